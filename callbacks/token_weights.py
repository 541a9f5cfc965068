"""Windows in which every counted token weighs the same, whatever the padding and the masks of its micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .base import MisconfigurationException
from .batch_tensors import samples_and_tokens
from .device_step import local_gradients
from .ignored_label import IGNORED
from .rank_mean import mean_over_ranks
from .topology import data_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class TokenWeights:
    """Weigh each micro-batch's mean loss by its counted tokens, and the gradients by the window's total.

    With n the counted tokens of a micro-batch and W micro-batches per window, Lightning and the strategy come to the
    mean over ranks of sum(n * gradient) / W. Divided by the mean over ranks of sum(n) / W this is the gradient of the
    mean over all counted tokens of the window. The total is known only at the step, so losses are weighed as they come
    and the gradients once, before their norm is taken. Nothing waits for the device but a fit's first micro-batch.

    Attributes:
        correction: What the gradients of the last step were multiplied by, and its losses are to be, 0-d fp32.
    """

    def __init__(self) -> None:
        self._unit: float | None = None  # power of two, so that dividing by it rounds nothing
        self._count: Tensor | None = None
        self._sum: Tensor | None = None  # of the weights of the open window, on this rank
        self.correction: Tensor | None = None

    def open_window(self) -> None:
        self._sum = None

    def begin_batch(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """Count the tokens of a micro-batch, on the device."""
        if self._unit is None:
            self._unit = _unit(trainer, batch)
        self._count = counted_tokens(pl_module, batch)

    def weigh(self, loss: Tensor) -> None:
        """Multiply a micro-batch's loss in place: what is back-propagated is this very tensor."""
        assert self._count is not None
        assert self._unit is not None
        weight = self._count.to(torch.float32) / self._unit
        self._sum = weight if self._sum is None else self._sum + weight
        factor = weight.to(loss.device)
        if isinstance(loss, DTensor):
            factor = DTensor.from_local(factor, loss.device_mesh, [Replicate()] * loss.device_mesh.ndim)
        loss.masked_fill_(factor == 0, 0.0).mul_(factor)  # a mean over nothing is NaN, and weighs nothing

    def settle(self, trainer: Trainer, optimizer: Any) -> Tensor | None:
        """Divide the gradients by the total of all ranks, a collective; returns that total of counted tokens, 0-d.

        ``None``: no micro-batch of the window had a loss. Where no token was counted the gradients are zero.
        """
        if self._sum is None:
            self.correction = None
            return None
        # Over tensor-parallel ranks too, which count the same tokens: their mean is no other.
        mean = mean_over_ranks(trainer, self._sum)
        window = float(trainer.accumulate_grad_batches)
        self.correction = torch.where(mean > 0, window / mean, 0.0)
        if gradients := local_gradients(optimizer):
            torch._foreach_mul_(gradients, self.correction.to(gradients[0].device))
        assert self._unit is not None
        return mean * (self._unit * data_parallel_size(trainer))


def counted_tokens(pl_module: LightningModule, batch: Any) -> Tensor:
    """0-d: the tokens of this rank's micro-batch that its loss is the mean over.

    Raises:
        MisconfigurationException: when the LightningModule has no ``count_targets`` and the batch no ``labels``.
    """
    count = getattr(pl_module, "count_targets", None)
    if count is not None:
        counted = count(batch)
        # Filled on the device: a copy from the host would wait.
        return counted if isinstance(counted, Tensor) else torch.full((), counted, device=pl_module.device)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        raise MisconfigurationException(
            f"batch of type {type(batch).__name__}: has no tensor `labels` to count targets in, as"
            f" average_over='tokens' must; define `count_targets(batch) -> Tensor` on {type(pl_module).__name__}: how"
            " many tokens its loss is the mean over."
        )
    return (labels != IGNORED).sum()


def losses_correction(trainer: Trainer) -> Tensor | None:
    """What the losses of the window that is stepped on are to be multiplied by for their mean; ``None``: nothing."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(weights := getattr(callback, "token_weights", None), TokenWeights):
            return weights.correction
    return None


def _unit(trainer: Trainer, batch: Any) -> float:
    """Near the tokens of a batch, equal on all ranks: counts as they are would overflow 16-bit gradients."""
    tokens = torch.tensor(samples_and_tokens(batch)[1], device=trainer.strategy.root_device)
    if trainer.world_size > 1:
        tokens = trainer.strategy.reduce(tokens, reduce_op="max")
    return float(2 ** round(math.log2(max(1, int(tokens)))))
