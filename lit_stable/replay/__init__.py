"""A step of a run once more, from a checkpoint: is it the same, and what was in it."""
