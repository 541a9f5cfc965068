"""Many numbers of one step to the loggers at once: one copy from the device, one call of each logger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .base import StabilityCallback, find_or_install
from .private_names import logged_step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Scalars(StabilityCallback):
    """Collect what monitors measure in a step, and pass it on when the step has ended.

    ``LightningModule.log`` costs about a millisecond a name, at every later micro-batch too (300 names measured:
    250 ms a call); here 300 names cost a fifth of a millisecond. The numbers go to every logger, in a row of their own
    with the step of Lightning's own row, and into ``trainer.callback_metrics`` and ``trainer.logged_metrics``, on all
    ranks, before callbacks of a higher ``order`` see the end of the batch. The host waits for the device once per step
    in which something was measured, after the whole step is queued.

    A monitor calls ``Scalars.of(trainer)`` in its ``setup`` and ``add`` in a logging step, with numbers that are equal
    on all ranks. Nothing is logged of its own.

    Example::

        >>> Scalars.of(trainer).add(["stability/weight_rms/wte"], torch.ones(1))  # doctest: +SKIP
    """

    order: ClassVar[int] = 70

    def __init__(self) -> None:
        self._names: list[str] = []
        self._values: list[Tensor] = []  # (n,) fp64, on the device

    @staticmethod
    def of(trainer: Trainer) -> Scalars:
        """The trainer's instance, installed if it has none yet."""
        return find_or_install(trainer, Scalars)

    def add(self, names: Sequence[str], values: Tensor | Sequence[float]) -> None:
        """Pass on ``values``, (n,) on any device, under ``names`` when the step ends; nothing is read here."""
        self._names += names
        self._values.append(torch.as_tensor(values, dtype=torch.float64).detach().reshape(len(names)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self._names:
            return
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in self._values:
            by_device.setdefault(tensor.device, []).append(tensor)
        read = {device: torch.cat(tensors).cpu() for device, tensors in by_device.items()}  # the one wait
        offsets = dict.fromkeys(read, 0)
        numbers: list[Tensor] = []
        for tensor in self._values:
            start = offsets[tensor.device]
            offsets[tensor.device] = start + len(tensor)
            numbers += read[tensor.device][start : start + len(tensor)].unbind()
        measured = dict(zip(self._names, numbers, strict=True))
        self._names, self._values = [], []
        self._pass_on(trainer, measured)

    def _pass_on(self, trainer: Trainer, measured: dict[str, Tensor]) -> None:
        step = trainer.callback_metrics.get("step")  # where a module logs one, Lightning takes it for the x axis
        plain = {name: float(value) for name, value in measured.items()}
        for logger in trainer.loggers:
            logger.log_metrics(plain, step=logged_step(trainer) if step is None else int(step))
        trainer.callback_metrics.update(measured)
        trainer.logged_metrics.update(measured)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._names, self._values = [], []
