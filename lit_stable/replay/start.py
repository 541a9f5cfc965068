"""From which checkpoint, and by which recipe, a step of a run is taken again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_stable.run.beginnings import Beginning, session_of_step
from lit_stable.run.branch import read_parent
from lit_stable.run.folder import checkpoint_path, checkpoint_step, checkpoints, find_checkpoint


@dataclass(frozen=True)
class Start:
    """Where a replay begins."""

    folder: Path
    """Of the run that took the step: the given one, or one that it grew out of."""
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
        ValueError: when ``step`` is below 1 or was taken in a folder that is gone, no checkpoint before it is left, or
            ``at`` is none or lies behind it.
    """
    folder, beginning = session_of_step(run, step)
    recipe = folder / f"recipe-{beginning.session:02d}.yaml"
    if at is not None:
        start = Start(folder, beginning, recipe, find_checkpoint(at, run.parent.parent, run.parent.name))
        if start.step >= step:
            raise ValueError(f"at={at}: stands at step {start.step}, behind which step {step} lies no more.")
        return start
    before = [path for path in checkpoints(folder) if (checkpoint_step(path) or 0) < step]
    parent = read_parent(folder)
    if not before and parent is not None:
        origin = checkpoint_path((folder / parent.run).resolve(), parent.step)
        before = [origin] if origin.exists() else []
        if not before:
            raise ValueError(
                f"{folder}: no checkpoint before step {step} is left, nor {origin}; give another with --at."
            )
    return Start(folder, beginning, recipe, before[-1] if before else None)
