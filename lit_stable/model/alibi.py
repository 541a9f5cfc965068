"""ALiBi: a penalty on attention scores that grows with distance, at another rate in each head.

Source: Press et al. 2022, arXiv:2108.12409. In fp32: bf16 would merge distances above 256.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch


@lru_cache(maxsize=8)  # making it copies from the host to the device, for which the host would wait at every step
def alibi_slopes(heads: int, device: torch.device | None = None) -> torch.Tensor:
    """Penalty per token of distance, (H,) fp32.

    For 2^k heads the geometric series 2^(-8/H), 2^(-16/H), ..., 2^-8. For other numbers, as the authors' code and BLOOM
    have it: the series of the next lower power of two, then every other slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(lower) + _geometric(2 * lower)[0::2][: heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi_bias(slopes: torch.Tensor, length: int) -> torch.Tensor:
    """What is added to the scores: -slope * (query - key), (H, T, T) fp32; the future is for the mask to hide."""
    position = torch.arange(length, device=slopes.device, dtype=torch.float32)
    return slopes[:, None, None] * (position[None, :] - position[:, None])


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]
