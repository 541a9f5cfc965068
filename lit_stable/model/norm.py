"""Norms whose statistics and gains are fp32 in every precision, and where a block has them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.config import GPTConfig, NormKind


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension (Ba et al. 2016): fp32 inside, the input's dtype outside.

    A gain in bf16 cannot leave 1.0 at ordinary learning rates: next to 1.0 bf16 values lie 1/128 apart. Stored as
    gain - 1 (``zero_centred``) it can.
    """

    def __init__(self, size: int, eps: float = 1e-5, bias: bool = True, zero_centred: bool = False) -> None:
        super().__init__(size, eps=eps, bias=bias)
        self.zero_centred = zero_centred

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = gain(self.weight, self.zero_centred), None if self.bias is None else self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019): fp32 inside; no bias, no centring."""

    def __init__(self, size: int, eps: float = 1e-5, zero_centred: bool = False) -> None:
        super().__init__(size, eps=eps)
        self.zero_centred = zero_centred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = gain(self.weight, self.zero_centred)
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class Gain(nn.Module):
    """A module whose few parameters multiply what passes; kept in fp32 and whole on every rank, as norms are."""


NORMS_AND_GAINS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm, Gain)
"""What is not decayed, and is kept in fp32 and whole on every rank; the classes above are among them.

Callbacks mean norms alone (`callbacks/module_patterns.is_norm`): a gain that normalises nothing, such as a gate, is
frozen with the weights around it, unless `norm_types` names its class.
"""


def is_norm_or_gain(module: nn.Module) -> bool:
    """Whether the parameters of `module` are kept as those of norms are, judged by type and never by name."""
    return isinstance(module, NORMS_AND_GAINS)


def gain(weight: torch.Tensor, zero_centred: bool) -> torch.Tensor:
    """The factor that a stored gain means, in fp32."""
    return 1.0 + weight.float() if zero_centred else weight.float()


def build_norm(kind: NormKind, size: int, config: GPTConfig) -> nn.Module:
    """A norm over a last dimension of `size`; `config.bias` adds a bias to layer norms."""
    zero_centred = config.norm_gain == "zero_centred"
    if kind == "layernorm":
        return LayerNorm(size, eps=config.norm_eps, bias=config.bias, zero_centred=zero_centred)
    return RMSNorm(size, eps=config.norm_eps, zero_centred=zero_centred)


def sublayer_norms(config: GPTConfig, sublayer: Literal["attention", "mlp"]) -> tuple[nn.Module, nn.Module]:
    """Norms of a sub-layer's input and of its output by `config.norm_position`; the identity where there is none."""
    place = config.norm_position
    on_output = place in ("post_sublayer", "sandwich") or (place, sublayer) == ("normformer", "attention")
    return _norm_if(place != "post_sublayer", config), _norm_if(on_output, config)


def _norm_if(wanted: bool, config: GPTConfig) -> nn.Module:
    return build_norm(config.norm, config.d_model, config) if wanted else nn.Identity()
