"""How far each step moves the weights, whatever optimizer takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .monitor import Monitor
from .parameter_sums import Grouping, ParameterSums, named_trainable
from .scalars import Scalars
from .shards import local

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class UpdateMonitor(Monitor):
    """Log the size of the optimizer's update, and its ratio to the weights, per layer and per component.

    Measured as weights after the step minus weights before, on steps that measure: so it is what really happened, for
    every optimizer, with decay, clipping and overridden rates in it, 0 where the step was skipped, and where a bf16
    weight is too coarse to move. It is not computed from Adam's state: that would be right for one optimizer alone and
    could not see any of these. The price is a copy of this rank's weights from just before to just after a measured
    step, when no activations are alive.

    One collective per measurement where parameters are sharded, none where every rank holds them whole.

    Logged: root mean square of the update, ``stability/update_rms`` over all trained parameters,
    ``stability/update_rms_layer/NAME``, ``stability/update_rms_component/NAME``; L2 norm of the update over L2 norm of
    the weights before it, ``stability/update_ratio``, ``stability/update_ratio_layer/NAME``,
    ``stability/update_ratio_component/NAME``, 0 where the weights are 0. About 1e-3 is usual for matrices.

    Args:
        every_steps: Optimizer steps between measurements, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        per_tensor: Also per parameter, with ``_tensor/NAME`` behind the name.

    Example::

        >>> Trainer(callbacks=[UpdateMonitor(every_steps=100)], logger=False)  # doctest: +SKIP
    """

    def __init__(self, every_steps: int | None = None, per_tensor: bool = False) -> None:
        super().__init__(every_steps)
        self.per_tensor = per_tensor
        self._sums: ParameterSums | None = None
        self._groups: Grouping | None = None
        self._before: list[Tensor] = []  # this rank's pieces

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sums = ParameterSums.of(trainer, named_trainable(pl_module, trainer))
        self._groups = Grouping(self._sums, self.per_tensor)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._sums is not None and self.begins(trainer):
            self._before = [local(p.detach()).clone() for p in self._sums.parameters]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self._before or self._sums is None or self._groups is None:
            return
        before, self._before = self._before, []
        with torch.no_grad():
            weights = self._sums.squares(before)
            torch._foreach_sub_(before, [local(p) for p in self._sums.parameters])  # no second copy
            both = self._sums.total(self._sums.squares(before), weights)
            updates, weights = map(self._groups.add_up, both)
            scalars, labels = Scalars.of(trainer), self._groups.labels
            scalars.add([f"stability/update_rms{label}" for label in labels], (updates / self._groups.sizes).sqrt())
            ratios = torch.where(weights == 0, 0.0, updates / weights).sqrt()
            scalars.add([f"stability/update_ratio{label}" for label in labels], ratios)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._sums = self._groups = None
        self._before = []
