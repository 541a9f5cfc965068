"""Python's garbage collector at the same step on every rank, instead of whenever it likes on each."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .base import MisconfigurationException, StabilityCallback, is_logging_step
from .progress import Progress
from .rank_gather import gather_ranks
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GarbageCollection(StabilityCallback):
    """Switch the automatic garbage collector off while training, and collect on all ranks after the same steps.

    A full collection takes a tenth of a second or more. Ranks collect at different steps by themselves, and each time
    all others wait: with many ranks some rank collects in nearly every step. Collected are all generations, after every
    ``every_steps``-th step and once before training. When training ends the collector is as it was before.

    Logged: ``stability/gc_seconds``: the last collection, of the slowest rank, at the logging step that follows it or
    falls on it.

    Args:
        every_steps: Optimizer steps between collections, >= 1. What is in reference cycles stays alive until then: a
            model that leaves tensors in cycles needs it small.

    Raises:
        MisconfigurationException: when ``every_steps`` is below 1.

    Example::

        >>> Trainer(callbacks=[GarbageCollection(every_steps=500)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 65  # before the numbers of a step are passed on

    def __init__(self, every_steps: int = 200) -> None:
        if every_steps < 1:
            raise MisconfigurationException(f"`GarbageCollection(every_steps={every_steps})`: must be at least 1.")
        self.every_steps = every_steps
        self._seen = 0
        self._seconds: float | None = None
        self._was_on = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Progress.of(trainer)
            Scalars.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._was_on = gc.isenabled() or self._was_on
        gc.disable()
        self._collect()
        self._seen = Progress.of(trainer).steps

    def _collect(self) -> None:
        began = time.perf_counter()
        gc.collect()
        self._seconds = time.perf_counter() - began

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = Progress.of(trainer).steps
        if step == self._seen:  # in mid-window
            return
        self._seen = step
        if step % self.every_steps == 0:
            self._collect()
        if self._seconds is not None and is_logging_step(trainer):
            device = trainer.strategy.root_device
            seconds = gather_ranks(torch.tensor([self._seconds], dtype=torch.float64, device=device)).amax(0)
            Scalars.of(trainer).add(["stability/gc_seconds"], seconds)
            self._seconds = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._was_on:
            gc.enable()
        self._was_on = False
