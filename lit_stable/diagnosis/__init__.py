"""What a finished or broken run tells afterwards: its scalars, what detectors find in them, its checkpoints."""
