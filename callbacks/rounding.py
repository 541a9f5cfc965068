"""Parameters stored so coarsely that an optimizer's steps are rounded away."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import rank_zero_warn


def least_rate(dtype: torch.dtype) -> float:
    """The learning rate below which Adam cannot move a value next to 1.0 stored in this dtype; 1/512 for bf16.

    Next below 1 values lie ``eps / 2`` apart, a step of less than half of that is lost, and Adam's step is at most
    about the learning rate.
    """
    return torch.finfo(dtype).eps / 4


def warn_of_rounding(optimizers: list[Any], gains: set[nn.Parameter]) -> None:
    """Warn when norm gains are stored in 16 bits and the peak learning rate of an Adam is too low to move them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            coarse = [p for p in group["params"] if p in gains and p.dtype in (torch.bfloat16, torch.float16)]
            if not coarse or "betas" not in group:
                continue
            dtype = coarse[0].dtype
            peak = max(float(group.get(key, 0.0)) for key in ("lr", "initial_lr", "max_lr"))
            if peak < least_rate(dtype):
                rank_zero_warn(
                    f"{len(coarse)} norm gains are stored in {dtype} and the learning rate is at most {peak:g}: steps"
                    f" below {least_rate(dtype):g} are rounded away next to 1.0, so they cannot move when set free;"
                    " keep norms in fp32 (precision bf16-mixed)."
                )
