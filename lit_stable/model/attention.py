"""Causal self-attention over all heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lit_stable.model.attention_context import AttentionContext
from lit_stable.model.attention_dropout import drop_by_groups, dropout_groups
from lit_stable.model.attention_kernels import ScoreRules, attend
from lit_stable.model.config import GPTConfig
from lit_stable.model.head_scale import HeadScale
from lit_stable.model.linear import Linear
from lit_stable.model.qk_norm import build_qk_norms

# B batch, T tokens, D d_model, H query heads, G key and value heads, K head size; D = H K


class Attention(nn.Module):
    """Multi-head causal attention (Vaswani et al. 2017), of grouped queries if so chosen (Ainslie et al. 2023).

    The rows of the fused projection run group by group: a group's queries, its key and its value rows together, so
    that a split of the rows over devices keeps groups whole. Without `n_kv_head` a group is one head.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.n_head = config.n_head
        self.dropout_groups = dropout_groups(config.kv_heads)
        self.first_head = 0  # of those on this device; what there is per head is looked up from here on
        self.queries = config.n_head // config.kv_heads  # per group
        self.rules = ScoreRules.of(config)
        rows = (config.n_head + 2 * config.kv_heads) * config.head_size
        self.qkv = Linear(config.d_model, rows, bias=config.bias)
        self.out = Linear(config.d_model, config.d_model, bias=config.bias)
        self.q_norm, self.k_norm, self.qk_scale = build_qk_norms(config)
        self.head_scale = HeadScale(config) if config.norm_position == "normformer" else nn.Identity()
        # Never called: the kernel drops. A module, so that whoever changes dropout in mid-run finds all of it by type.
        self.dropout = nn.Dropout(config.dropout_of("attention"))

    def forward(self, x: Tensor, context: AttentionContext, layer: Tensor | None = None) -> Tensor:
        """Mix tokens with their past: x (B, T, D) -> (B, T, D); ``layer`` as `AttentionContext.layer` has it."""
        q, k, v = self._heads(x, context)

        def kernel(q: Tensor, k: Tensor, v: Tensor, heads: slice, p: float = 0.0) -> Tensor:
            return attend(q, k, v, self.rules, context.past.of(heads), layer, p)

        p = self.dropout.p if self.training else 0.0
        if p > 0:
            places = {"groups": self.dropout_groups, "n_head": self.n_head, "first_head": self.first_head}
            y = drop_by_groups(kernel, q, k, v, p, **places)  # (B, H, T, K)
        else:
            y = kernel(q, k, v, self._here(q))
        mixed: Tensor = self.out(self.head_scale(y.transpose(1, 2)).flatten(2))  # (B, T, D)
        return mixed

    def _heads(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, K), keys and values (B, G, T, K), with all that stands before the product done to them."""
        q, k, v = self.split_qkv(self.qkv(x))
        q, k = self.qk_scale(self.q_norm(q)), self.k_norm(k)
        if context.rope is not None:
            q, k = context.rope.rotate(q), context.rope.rotate(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _here(self, q: Tensor) -> slice:
        """Where the query heads of this device stand among all."""
        return slice(self.first_head, self.first_head + q.shape[1])

    def split_qkv(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output of the fused projection (B, T, rows) -> queries (B, T, H, K), keys and values (B, T, G, K)."""
        # The number of groups comes from the tensor: a device that holds some of the heads runs the same code.
        shape = (-1, self.queries + 2, self.head_size)
        groups: Tensor = projected.unflatten(-1, shape)  # type: ignore[no-untyped-call]  # (B, T, G, H/G + 2, K)
        # Not by index: with dropout these are what a compiled graph hands on, and torch 2.13 gives single views that it
        # hands on sizes out of nowhere.
        q, k, v = groups.split((self.queries, 1, 1), dim=-2)  # type: ignore[no-untyped-call]
        return q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)

    @property
    def key_heads(self) -> int:
        """G over all devices: what ``QKClip`` asks."""
        return self.n_head // self.queries

    def rows_of_heads(self, q: Tensor, k: Tensor) -> list[tuple[nn.Module, Tensor]]:
        """A factor for each query head (H,) and each key head (G,) as one for each row of the projection."""
        groups = torch.cat([q.reshape(len(k), -1), k[:, None], torch.ones_like(k)[:, None]], 1)  # (G, H/G + 2)
        return [(self.qkv, groups.flatten().repeat_interleave(self.head_size))]

    def queries_keys(
        self, x: Tensor, context: AttentionContext, layer: Tensor | None = None
    ) -> tuple[Tensor, Tensor, float, Tensor | None]:
        """What the logits of a call of ``forward`` are made of, whatever the kernel, for ``AttentionMonitor``.

        Queries (B, H, T, K), keys (B, G, T, K), the factor of their products, and the mask of the kernels that have
        one. Where the kernel divides and multiplies again, such as by the root of the factor, that is left out.
        """
        q, k, _ = self._heads(x, context)
        if layer is not None and self.rules.layer_scaling == "hf_inverse_layer":
            q = (q.float() / layer).to(q.dtype)
        scale = self.head_size**-0.5 if self.rules.scale is None else self.rules.scale
        return q, k, scale, context.past.of(self._here(q)).mask
