"""What the recovery ladder cannot work with, each in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .base import MisconfigurationException, refuse_manual_optimization
from .detectors import Detectors
from .dropout_rate import DropoutRate
from .recovery_exit import RecoveryStopped
from .recovery_ledger import Entry
from .recovery_overrides import clips
from .recovery_rungs import Rung
from .recovery_standing import Standing
from .recovery_words import TO_GO_ON, reason
from .safe_checkpoints import SafeCheckpoints

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def refuse_incomplete(trainer: Trainer, module: LightningModule, rungs: Sequence[Rung]) -> None:
    """Raise when something is not there that a rung needs; called in ``setup``."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    rewinds = [rung for rung in rungs if rung.do == "rewind"]
    refuse_manual_optimization(
        module, "`Recovery` acts around Lightning's own optimizer step; use automatic optimization."
    )
    if not any(isinstance(c, Detectors) for c in callbacks):
        raise MisconfigurationException(
            "`Recovery`: nothing tells it of losses and trouble; put `Detectors()` into the trainer's callbacks"
            " (stability.detectors: {} in a recipe)."
        )
    if rewinds and not any(isinstance(c, SafeCheckpoints) for c in callbacks):
        raise MisconfigurationException(
            "`Recovery`: a rewind goes to a checkpoint that `SafeCheckpoints` has written, and it is not there; put"
            " `SafeCheckpoints()` into the trainer's callbacks, or leave the rung rewind out."
        )
    if any(rung.clip is not None for rung in rewinds) and not clips(trainer):
        raise MisconfigurationException(
            "`Recovery`: a rewind with clip changes what `GradClip` clips to, and it is not there; put `GradClip()`"
            " into the trainer's callbacks, or leave clip out."
        )


def refuse_data_that_cannot_be_dropped(trainer: Trainer, rungs: Sequence[Rung]) -> None:
    """Raise when a rewind would drop data that the training loader reads all the same.

    Called when the loader is there. Who leaves out ``Progress.dropped`` says so by an attribute ``leaves_out_dropped``:
    the LightningModule, the data module, the loader, its data set, sampler or batch sampler.
    """
    for rung in rungs:
        if rung.dropout is not None:
            DropoutRate(rung.dropout).find(trainer.lightning_module, "Recovery")
    if not any(rung.do == "rewind" and (rung.drop or rung.reshuffle) for rung in rungs):
        return
    loader: Any = trainer.train_dataloader
    parts = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
    hosts = [trainer.lightning_module, getattr(trainer, "datamodule", None), loader, *parts]
    if not any(getattr(host, "leaves_out_dropped", False) for host in hosts):
        raise MisconfigurationException(
            "`Recovery`: a rewind drops data, and nothing says that the training loader leaves out what is dropped;"
            " give `DataLoader(batch_sampler=ResumingBatches(...))`, or read from `Progress.samples` on past"
            " `Progress.dropped` and say so by `leaves_out_dropped = True` on the data module; or rewind with"
            " drop: false."
        )


def refuse_branch_left_behind(now: Standing, step: int, seen: int) -> None:
    """Raise when a checkpoint is of a branch that a rewind has left: its steps are none of the run's any more."""
    for rewind in now.rewinds:
        if seen < rewind.number and step > rewind.done["to"]:
            there = now.latest()
            raise MisconfigurationException(
                f"checkpoint of step {step}: belongs to a branch that the rewind at step {rewind.step} left"
                f" ({reason(rewind)}); go on from {there.path if there else 'the start'}."
            )


def refuse_after_the_end(stopped: Entry, ledger: Path) -> NoReturn:
    """Raise when a run is gone on with that the ladder has ended."""
    raise RecoveryStopped(
        f"{ledger}: the ladder has ended this run after step {stopped.step} ({reason(stopped)}); look into it, and to"
        f" go on all the same give {TO_GO_ON}."
    )
