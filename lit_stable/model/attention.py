"""Causal self-attention over all heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.attention_dropout import drop_by_groups, dropout_groups
from lit_stable.model.config import GPTConfig
from lit_stable.model.norm import build_norm
from lit_stable.model.rotary import Rotary

# B batch, T tokens, D d_model, H heads, K head size; D = H K


class Attention(nn.Module):
    """Multi-head causal attention (Vaswani et al. 2017) with optional per-head query/key norm and rotary phases.

    The rows of the fused projection run head by head, each head's query, key and value rows together, so that a
    split of the rows over devices keeps heads whole.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.n_head = config.n_head
        self.dropout_groups = dropout_groups(config.n_head)
        self.first_head = 0  # of those on this device; what there is per head is looked up from here on
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm != "none":
            self.q_norm = build_norm(config.qk_norm, config.head_size, config)
            self.k_norm = build_norm(config.qk_norm, config.head_size, config)
        # Never called: the kernel drops. A module, so that whoever changes dropout in mid-run finds all of it by type.
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, rope: Rotary | None) -> torch.Tensor:
        """Mix tokens with their past: x (B, T, D) -> (B, T, D)."""
        # The number of heads comes from the tensor: a device that holds some of the heads runs the same code.
        q, k, v = self.split_qkv(self.qkv(x))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rope.rotate(q), rope.rotate(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, K)
        p = self.dropout.p if self.training else 0.0
        if p > 0:
            heads = {"groups": self.dropout_groups, "n_head": self.n_head, "first_head": self.first_head}
            y = drop_by_groups(causal, q, k, v, p, **heads)
        else:
            y = causal(q, k, v, slice(self.first_head, self.first_head + q.shape[1]))
        mixed: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))  # (B, T, D)
        return mixed

    def split_qkv(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output of the fused projection (B, T, 3 D) -> queries, keys, values, (B, T, H, K) each."""
        heads: torch.Tensor = projected.unflatten(-1, (-1, 3, self.head_size))  # type: ignore[no-untyped-call]
        q, k, v = heads.unbind(-2)
        return q, k, v


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: slice, dropout_p: float = 0.0) -> torch.Tensor:
    """Each token's mixture of the values up to it, for some of the heads: (B, H, T, K), three times, -> (B, H, T, K).

    ``heads`` says where they stand among all heads; nothing here differs from head to head.
    """
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
