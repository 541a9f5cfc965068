"""Attention to something else than the past, and the gated block that brings it into a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_stable.model.compute_dtype import compute_dtype
from lit_stable.model.config import GPTConfig
from lit_stable.model.linear import Linear
from lit_stable.model.mlp import build_mlp
from lit_stable.model.norm import Gain, sublayer_norms
from lit_stable.model.qk_norm import build_qk_norms

# B batch, T tokens, S positions that are attended to, D d_model, E their width, H heads, K head size; D = H K


class CrossAttention(nn.Module):
    """Multi-head attention of one sequence to all of another, without a mask (Vaswani et al. 2017).

    Args:
        config: Of heads, widths, biases and norms of queries and keys.
        width: Of the sequence that is attended to.
    """

    def __init__(self, config: GPTConfig, width: int) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.q = Linear(config.d_model, config.d_model, bias=config.bias)
        self.k = Linear(width, config.d_model, bias=config.bias)
        self.v = Linear(width, config.d_model, bias=config.bias)
        self.out = Linear(config.d_model, config.d_model, bias=config.bias)
        self.q_norm, self.k_norm, self.qk_scale = build_qk_norms(config)
        self.scale = 1.0 if config.qk_norm == "l2" else config.head_size**-0.5

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        """x (B, T, D), source (B, S, E) -> (B, T, D)."""
        q, k, v = (self._heads(y) for y in (self.q(x), self.k(source), self.v(source)))
        q, k = self.qk_scale(self.q_norm(q)), self.k_norm(k)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)  # (B, H, T, K)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))  # (B, T, D)
        return mixed

    def _heads(self, projected: Tensor) -> Tensor:
        """(B, S, D) -> (B, H, S, K)."""
        heads: Tensor = projected.unflatten(-1, (-1, self.head_size))  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)


class Gate(Gain):
    """tanh(a) times what passes, a being one number that starts at 0: at first nothing passes.

    Source: Alayrac et al. 2022, arXiv:2204.14198, section 2.2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.tanh(self.weight.float())).to(x.dtype)


class GatedBlock(nn.Module):
    """Attention to the image, then an MLP, each behind a gate added to the residual stream of a language model.

    Args:
        config: As `GatedOptions.config` makes it.
        width: Of the image's features.
    """

    def __init__(self, config: GPTConfig, width: int) -> None:
        super().__init__()
        self.attention_norm, self.attention_output_norm = sublayer_norms(config, "attention")
        self.attention = CrossAttention(config, width)
        self.attention_gate = Gate()
        self.mlp_norm, self.mlp_output_norm = sublayer_norms(config, "mlp")
        self.mlp = build_mlp(config)
        self.mlp_gate = Gate()

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        """x (B, T, D), features (B, S, E) -> (B, T, D) in x's dtype."""
        dtype = compute_dtype(self.attention.q.weight)
        y = self.attention(self.attention_norm(x).to(dtype), features.to(dtype))
        x = x + self.attention_gate(self.attention_output_norm(y)).to(x.dtype)
        y = self.mlp(self.mlp_norm(x).to(dtype))
        x = x + self.mlp_gate(self.mlp_output_norm(y)).to(x.dtype)
        return x
