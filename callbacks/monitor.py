"""What all monitors share: when they measure, and where their numbers go."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from .base import MisconfigurationException, StabilityCallback
from .private_names import batches_that_stepped, window_is_open
from .progress import Progress
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Monitor(StabilityCallback):
    """Base of the callbacks that only watch: with one of them a run is bit-identical to a run without.

    It measures at logging steps, or at some of them; no other step waits for the device or for another rank.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of
            ``Trainer(log_every_n_steps=...)``; ``None``: every logging step.

    Raises:
        MisconfigurationException: when ``every_steps`` is below 1, or nothing is ever logged.
    """

    order: ClassVar[int] = 50

    def __init__(self, every_steps: int | None = None) -> None:
        if every_steps is not None and every_steps < 1:
            raise MisconfigurationException(f"`{type(self).__name__}(every_steps={every_steps})`: must be at least 1.")
        self.every_steps = every_steps
        self._begun = 0  # the last due step that an optimizer began, where there may be several

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if interval < 1:
            raise MisconfigurationException(
                f"`Trainer(log_every_n_steps={interval})`: nothing is ever logged, so `{type(self).__name__}` would"
                " never measure; set it to at least 1."
            )
        Scalars.of(trainer)
        self._begun = 0
        if not pl_module.automatic_optimization:
            Progress.of(trainer)  # which of the batches step

    def is_due(self, trainer: Trainer) -> bool:
        """Whether the optimizer step now under way, or just taken in this batch, is to be measured."""
        # Not by `global_step`, which counts each of several optimizers. By the loggers' count, but for a module that
        # steps when it likes: there they count every batch, and the one that steps might never be theirs.
        own = trainer.lightning_module.automatic_optimization
        before = batches_that_stepped(trainer) if own else Progress.of(trainer).start.steps
        return (before + 1) % self._interval(trainer) == 0

    def begins(self, trainer: Trainer) -> bool:
        """Whether a step is due and its first optimizer asks, in ``on_before_optimizer_step``: they may take turns."""
        if not self.is_due(trainer):
            return False
        if trainer.lightning_module.automatic_optimization:
            return True
        before, self._begun = self._begun, Progress.of(trainer).steps
        return self._begun != before

    def has_ended(self, trainer: Trainer) -> bool:
        """Whether a step that was due has just been taken, as ``on_train_batch_end`` finds it."""
        if not self.is_due(trainer):
            return False
        if trainer.lightning_module.automatic_optimization:
            return not window_is_open(trainer)
        progress = Progress.of(trainer)
        return progress.steps > progress.start.steps

    def _interval(self, trainer: Trainer) -> int:
        logging: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return logging * math.ceil((self.every_steps or 1) / logging)
