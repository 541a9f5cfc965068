"""The mean of a tensor over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def mean_over_ranks(trainer: Trainer, value: Tensor) -> Tensor:
    """Mean of a tensor over all ranks, on the device. A collective: all ranks call it."""
    if trainer.world_size == 1:
        return value
    # Not `strategy.reduce`: it puts a barrier before the sum, for which the host waits.
    mean = value / trainer.world_size
    dist.all_reduce(mean)
    return mean
