"""The end of a fit before its time: at a step boundary, behind one checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class EarlyEnd:
    """Ends a fit after the step that was just taken, and can be undone.

    Without the validation with which Lightning ends a stopped run, and whatever minimum of steps or epochs was given:
    whoever stops a run may not wait for either.
    """

    def __init__(self) -> None:
        self._overridden: list[tuple[Any, str, Any]] = []  # (owner, attribute, what it was)
        self._ended = False

    def end(self, trainer: Trainer) -> None:
        """To be called by all ranks at the end of a batch that stepped (:func:`~.private_names.after_batch_end`)."""
        loop = trainer.fit_loop
        overrides: list[tuple[Any, str, Any]] = [
            (trainer, "limit_val_batches", 0),
            (loop, "min_epochs", None),
            (loop.epoch_loop, "min_steps", None),
        ]
        for owner, name, value in overrides:
            own = getattr(owner, name)
            if own != value:  # or somebody else has ended the fit in this very step, and puts it back
                self._overridden.append((owner, name, own))
                setattr(owner, name, value)
        trainer.should_stop = self._ended = True

    def undo(self, trainer: Trainer) -> None:
        """Put back what was changed; nothing happens where nothing was."""
        for owner, name, value in self._overridden:
            setattr(owner, name, value)
        if self._ended:
            trainer.should_stop = False  # or Lightning 2.5.0 ends the next fit before its first step
        self._overridden, self._ended = [], False


def save_now(trainer: Trainer, folder: str | None = None, prefix: str = "stopped") -> None:
    """Write one checkpoint; called by all ranks, behind the hooks of a batch that stepped.

    By the first checkpoint callback that has ``save_now(trainer)``; where none does, to ``PREFIX-step=N.ckpt`` in
    ``folder``, by default the trainer's root folder.
    """
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "save_now"):
            callback.save_now(trainer)
            return
    name = f"{prefix}-step={trainer.global_step}.ckpt"
    trainer.save_checkpoint(os.path.join(folder or trainer.default_root_dir, name))
