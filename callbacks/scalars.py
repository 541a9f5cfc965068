"""Many numbers of one step to the loggers at once: one copy from the device, one call of each logger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .base import StabilityCallback, find_or_install
from .deferred_logging import log_late
from .late_reads import LateReads
from .private_names import batches_that_stepped, window_is_open

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Scalars(StabilityCallback):
    """Collect what monitors measure in a step, and pass it on when the step has ended.

    ``LightningModule.log`` costs about a millisecond a name, at every later micro-batch too (300 names measured:
    250 ms a call); here 300 names cost a fifth of a millisecond. The numbers go to every logger, in a row of their own
    with the step of Lightning's own row, and into ``trainer.callback_metrics`` and ``trainer.logged_metrics``, on all
    ranks, before callbacks of a higher ``order`` see the end of the batch. The host waits for none of them: loggers get
    them a micro-batch later (:class:`~.late_reads.LateReads`), the trainer has them on the device.

    A monitor calls ``Scalars.of(trainer)`` in its ``setup`` and ``add`` in a logging step, with numbers that are equal
    on all ranks. Nothing is logged of its own.

    Attributes:
        of_this_step: What was measured in the step that has just ended; the trainer keeps what is older beside it.

    Example::

        >>> Scalars.of(trainer).add(["stability/weight_rms/wte"], torch.ones(1))  # doctest: +SKIP
    """

    order: ClassVar[int] = 70

    def __init__(self) -> None:
        self._names: list[str] = []
        self._values: list[Tensor] = []  # (n,) fp64, on the device
        self.of_this_step: dict[str, Tensor] = {}
        self._has_ended = False

    @staticmethod
    def of(trainer: Trainer) -> Scalars:
        """The trainer's instance, installed if it has none yet."""
        LateReads.of(trainer)  # one that is installed while others are set up is not set up itself
        return find_or_install(trainer, Scalars)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            LateReads.of(trainer)

    def add(self, names: Sequence[str], values: Tensor | Sequence[float]) -> None:
        """Pass on ``values``, (n,) on any device, under ``names`` when the step ends; nothing is read here."""
        self._names += names
        self._values.append(torch.as_tensor(values, dtype=torch.float64).detach().reshape(len(names)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._has_ended:
            self.of_this_step = {}
        self._has_ended = not window_is_open(trainer)
        if not self._names:
            return
        values = [value for tensor in self._values for value in tensor.unbind()]
        measured = dict(zip(self._names, values, strict=True))
        self._names, self._values = [], []
        self.of_this_step.update(measured)
        step = trainer.callback_metrics.get("step")  # where a module logs one, Lightning takes it for the x axis
        log_late(trainer, measured, batches_that_stepped(trainer) if step is None else int(step))
        trainer.callback_metrics.update(measured)
        trainer.logged_metrics.update(measured)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._names, self._values = [], []
        self.of_this_step, self._has_ended = {}, False
