"""The position-wise feed-forward layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.config import GPTConfig

# B batch, T tokens, D d_model, F width inside the MLP


class GELUMLP(nn.Module):
    """down(GELU(up(x))), with the exact GELU (Hendrycks and Gimpel 2016)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.d_model, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, D) -> (B, T, D)."""
        y: torch.Tensor = self.down(F.gelu(self.up(x)))  # (B, T, F) inside
        return y


class SwiGLUMLP(nn.Module):
    """down(SiLU(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202, equation 6)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.hidden, bias=config.bias)
        self.up = nn.Linear(config.d_model, config.hidden, bias=config.bias)
        self.down = nn.Linear(config.hidden, config.d_model, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, D) -> (B, T, D)."""
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))  # (B, T, F) inside
        return y


MLPS: dict[str, type[GELUMLP] | type[SwiGLUMLP]] = {"gelu": GELUMLP, "swiglu": SwiGLUMLP}
"""`GPTConfig.mlp` -> class."""
