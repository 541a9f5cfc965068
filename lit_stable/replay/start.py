"""From which checkpoint, and by which recipe, a step of a run is taken again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_stable.run.beginnings import Beginning, read_beginnings
from lit_stable.run.branch import read_parent
from lit_stable.run.folder import checkpoint_path, checkpoint_step, checkpoints, find_checkpoint


@dataclass(frozen=True)
class Start:
    """Where a replay begins."""

    beginning: Beginning
    """Of the session that took the step."""
    recipe: Path
    checkpoint: Path | None
    """None: at step 0."""

    @property
    def origin(self) -> str:
        """Where it begins, in words."""
        return "the beginning" if self.checkpoint is None else str(self.checkpoint)

    @property
    def step(self) -> int:
        """Optimizer steps behind the checkpoint."""
        return 0 if self.checkpoint is None else checkpoint_step(self.checkpoint) or 0


def find_start(run: Path, step: int, at: str | None = None) -> Start:
    """The nearest checkpoint before a step, or the given one, and the recipe that the step ran under.

    Args:
        run: Run folder.
        step: Optimizer step, counted from 1.
        at: A checkpoint, or ``RUN@STEP``, instead of the nearest.

    Raises:
        ValueError: when ``step`` is below 1, no checkpoint before it is left, or ``at`` is none or lies behind it.
    """
    if step < 1:
        raise ValueError(f"step={step}: optimizer steps count from 1.")
    beginning = next(one for one in reversed(read_beginnings(run)) if one.steps < step)
    recipe = run / f"recipe-{beginning.session:02d}.yaml"
    if at is not None:
        start = Start(beginning, recipe, find_checkpoint(at, run.parent.parent, run.parent.name))
        if start.step >= step:
            raise ValueError(f"at={at}: stands at step {start.step}, behind which step {step} lies no more.")
        return start
    before = [path for path in checkpoints(run) if (checkpoint_step(path) or 0) < step]
    parent = read_parent(run)
    if not before and parent is not None:
        origin = checkpoint_path((run / parent.run).resolve(), parent.step)
        before = [origin] if origin.exists() else []
        if not before:
            raise ValueError(f"{run}: no checkpoint before step {step} is left, nor {origin}; give another with --at.")
    return Start(beginning, recipe, before[-1] if before else None)
