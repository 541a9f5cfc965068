"""A smooth bound on scores and logits."""

from __future__ import annotations

import torch


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), in fp32, in the dtype of x (Gemma 2, arXiv:2408.00118): nearly x while |x| is far below."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)
