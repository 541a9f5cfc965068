"""The loss of an accumulation window, over all ranks, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .private_optimizer_names import loss_scale
from .rank_mean import mean_over_ranks
from .token_weights import losses_correction

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class WindowLoss:
    """Adds up what is backpropagated in a window: Lightning has divided it by the number of micro-batches already.

    Where steps are averaged over tokens the means are too; they are asked for within ``on_before_optimizer_step``.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None  # 0-d, fp32, multiplied by the loss scale if there is one

    @property
    def is_empty(self) -> bool:
        """Whether nothing was backpropagated: ``training_step`` returned None all through the window."""
        return self._sum is None

    def add(self, loss: Tensor) -> None:
        """Take in the loss of one micro-batch, as ``on_before_backward`` has it."""
        whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        part = whole.detach().to(torch.float32).reshape(())
        self._sum = part if self._sum is None else self._sum + part

    def clear(self) -> None:
        """Begin a new window."""
        self._sum = None

    def own(self, trainer: Trainer) -> Tensor:
        """Mean over the window on this rank alone, 0-d fp32."""
        assert self._sum is not None
        scale, correction = loss_scale(trainer), losses_correction(trainer)
        own = self._sum if scale is None else self._sum / scale
        return own if correction is None else own * correction.to(own.device)

    def mean(self, trainer: Trainer) -> Tensor:
        """Mean over the window and all ranks, 0-d fp32, the same on each. A collective: all ranks call it."""
        return mean_over_ranks(trainer, self.own(trainer))
