"""A full disk ends a run at its next checkpoint; say so while there is time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .base import MisconfigurationException
from .events import Event, Events, emit
from .monitor import Monitor
from .progress import Progress
from .rank_gather import gather_ranks
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_GIB = 1 << 30


class DiskSpace(Monitor):
    """Log the free space of the disk that the run writes to, and tell when it falls below a limit.

    What rank 0 sees is told to the others once per measurement. An event ``disk_low`` is told once, and again after
    there was a tenth more than the limit in between.

    Logged: ``stability/disk_free_gib``.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        min_free_gib: Limit in GiB, > 0: a few checkpoints' worth.
        folder: What to look at; ``None``: the folder of the run's events, so its logs.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when the limit is not above 0.

    Example::

        >>> Trainer(callbacks=[DiskSpace(min_free_gib=100)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, min_free_gib: float = 20.0, folder: str | None = None) -> None:
        super().__init__(every_steps)
        if not min_free_gib > 0:
            raise MisconfigurationException(f"`DiskSpace(min_free_gib={min_free_gib})`: must be above 0.")
        self.min_free_gib = min_free_gib
        self.folder = folder
        self._is_low = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Events.of(trainer)
            Progress.of(trainer)
            self._is_low = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self.has_ended(trainer):
            return
        folder = Path(self.folder) if self.folder else Events.of(trainer).folder or Path(trainer.default_root_dir)
        own = torch.tensor([free_bytes(folder)], dtype=torch.float64, device=trainer.strategy.root_device)
        free = float(gather_ranks(own)[0]) / _GIB  # every rank goes by what rank 0 sees
        Scalars.of(trainer).add(["stability/disk_free_gib"], [free])
        if free < self.min_free_gib and not self._is_low:
            self._is_low = True
            evidence = {"free_gib": free, "min_free_gib": self.min_free_gib, "folder": str(folder)}
            emit(trainer, Event(Progress.of(trainer).steps, "disk_low", evidence))
        elif free > 1.1 * self.min_free_gib:
            self._is_low = False


def free_bytes(folder: Path) -> float:
    """Free space where a folder lies or would lie; NaN where that cannot be told."""
    there = next((p for p in (folder, *folder.absolute().parents) if p.exists()), None)
    try:
        return float("nan") if there is None else float(shutil.disk_usage(there).free)
    except OSError:
        return float("nan")
