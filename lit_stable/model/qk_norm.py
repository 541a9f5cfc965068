"""Norms of each head's queries and keys, which keep attention scores in bounds."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.config import GPTConfig
from lit_stable.model.norm import Gain, build_norm


class L2Norm(nn.Module):
    """Unit length over the last dimension, in fp32: the product of queries and keys is a cosine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., K), length 1."""
        return F.normalize(x.float(), dim=-1).to(x.dtype)


class CosineScale(Gain):
    """The factor that takes the place of 1/sqrt(K) under `qk_norm: l2`, one learned number per layer or a fixed one.

    Source: Henry et al. 2020, arXiv:2010.04245. Their L, a long sequence of the training data, is `max_length` here.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fixed = None if config.qk_l2_scale == "learned" else float(config.qk_l2_scale)
        if self.fixed is None:
            self.scale = nn.Parameter(torch.empty(1))

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        """Unit queries (..., K) -> scaled ones, in their dtype."""
        factor: torch.Tensor | float = self.scale.float() if self.fixed is None else self.fixed
        return (q.float() * factor).to(q.dtype)


def initial_cosine_scale(length: int) -> float:
    """log2(L^2 - L): large enough that a softmax over L cosines can single one out.

    Example::

        >>> round(initial_cosine_scale(1024), 3)
        19.999
    """
    return math.log2(length * length - length)


def build_qk_norms(config: GPTConfig) -> tuple[nn.Module, nn.Module, nn.Module]:
    """What queries pass, what keys pass, and what scales queries afterwards; the identity where there is nothing."""
    kind = config.qk_norm
    if kind == "none":
        return nn.Identity(), nn.Identity(), nn.Identity()
    if kind == "l2":
        return L2Norm(), L2Norm(), CosineScale(config)
    return build_norm(kind, config.head_size, config), build_norm(kind, config.head_size, config), nn.Identity()
