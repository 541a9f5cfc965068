"""The position-wise feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.config import GPTConfig
from lit_stable.model.gelu import gelu
from lit_stable.model.linear import Linear
from lit_stable.model.norm import build_norm

# B batch, T tokens, D d_model, F width inside the MLP

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""`GPTConfig.mlp` -> the function between the two matrices of an `MLP`."""


class MLP(nn.Module):
    """down(f(up(x))), with f a GELU or ReLU; under NormFormer a norm follows f."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.mlp]
        self.up = Linear(config.d_model, config.hidden, bias=config.bias)
        self.inner_norm = _inner_norm(config)
        self.down = Linear(config.hidden, config.d_model, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, D) -> (B, T, D)."""
        y: torch.Tensor = self.down(self.inner_norm(self.activation(self.up(x))))  # (B, T, F) inside
        return y


class SwiGLUMLP(nn.Module):
    """down(SiLU(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202, equation 6); NormFormer norms the product."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = Linear(config.d_model, config.hidden, bias=config.bias)
        self.up = Linear(config.d_model, config.hidden, bias=config.bias)
        self.inner_norm = _inner_norm(config)
        self.down = Linear(config.hidden, config.d_model, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, D) -> (B, T, D)."""
        y: torch.Tensor = self.down(self.inner_norm(F.silu(self.gate(x)) * self.up(x)))  # (B, T, F) inside
        return y


def build_mlp(config: GPTConfig) -> MLP | SwiGLUMLP:
    """The MLP of a block by `GPTConfig.mlp`."""
    return SwiGLUMLP(config) if config.mlp == "swiglu" else MLP(config)


def _inner_norm(config: GPTConfig) -> nn.Module:
    normed = config.norm_position == "normformer"
    return build_norm(config.norm, config.hidden, config) if normed else nn.Identity()
