"""Norms whose statistics and gains are fp32 in every precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.config import GPTConfig, NormKind


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension (Ba et al. 2016): fp32 inside, the input's dtype outside.

    A gain in bf16 cannot leave 1.0 at ordinary learning rates: next to 1.0 bf16 values lie 1/128 apart.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019): fp32 inside; no bias, no centring."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


NORM_TYPES: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)
"""What counts as a norm for weight decay and for fp32 storage; the classes above are among them."""


def is_norm(module: nn.Module) -> bool:
    """Whether the parameters of `module` are norm gains and biases, judged by type and never by name."""
    return isinstance(module, NORM_TYPES)


def build_norm(kind: NormKind, size: int, config: GPTConfig) -> nn.Module:
    """A norm over a last dimension of `size`; `config.bias` adds a bias to layer norms."""
    if kind == "layernorm":
        return LayerNorm(size, eps=config.norm_eps, bias=config.bias)
    return RMSNorm(size, eps=config.norm_eps)
