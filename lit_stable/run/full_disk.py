"""What rank 0 alone writes for a run, and what is said where the disk is full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lightning.pytorch import Trainer

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.not_written import FULL, not_written

T = TypeVar("T")


def on_rank_zero(trainer: Trainer, folder: Path, act: Callable[[], T]) -> T:
    """Do on rank 0 what reads or writes a run's folder, and give the result to all ranks, which call this together.

    Raises:
        MisconfigurationException: on all ranks, with a sentence, when the folder cannot be written to or one of its
            files cannot be read; a ``CheckpointError`` where the disk is full.
    """
    done = problem = None
    is_full = False
    try:
        done = act() if trainer.is_global_zero else None
    except OSError as error:  # told to all: the others wait here
        is_full = error.errno in FULL
        problem = full_disk_sentence(error, folder) if is_full else _not_writable(error, folder)
    except ValueError as error:
        problem = str(error)
    done, problem, is_full = trainer.strategy.broadcast((done, problem, is_full))
    if problem is not None:
        raise (CheckpointError if is_full else MisconfigurationException)(problem)
    return done  # type: ignore[return-value]


def full_disk_sentence(error: OSError, folder: Path) -> str:
    """The sentence about a disk that is full; ``folder`` is named where the error names no file."""
    return not_written(Path(error.filename) if isinstance(error.filename, str) else folder, error)


def _not_writable(error: OSError, folder: Path) -> str:
    return (
        f"{folder}: cannot be written to ({error.strerror or error}), and a run keeps its checkpoints and logs there;"
        " mend that, or begin under another run.root, at a checkpoint by --ckpt_path."
    )
