"""The dtype in which a matrix will be multiplied."""

from __future__ import annotations

import torch

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Autocast's, or that of the weight. Asked inside a module: there a sharding wrapper has put the weight it uses."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
