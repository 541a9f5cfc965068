"""Ways to compute softmax(scores) @ values, and which of them the options of a model allow.

- ``sdpa``: torch's scaled_dot_product_attention, causal: flash, cuDNN or memory-efficient kernels, whichever torch has
  for the dtype and the device.
- ``masked``: the same with a mask of (T, T) scores: ALiBi or documents.
- ``flex``: FlexAttention, compiled on CUDA: soft caps, ALiBi and documents without any (T, T) tensor. No dropout.
- ``explicit``: scores written out in the compute dtype, softmax in fp32. Everything, slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lit_stable.model.attention_options import LayerScaling
from lit_stable.model.config import GPTConfig

# B batch, H query heads, G key and value heads, T tokens, K head size

Kernel = Literal["sdpa", "masked", "flex", "explicit"]

_FLEX_HEAD_SIZE = 16  # the smallest that FlexAttention takes on CUDA


def choose_kernel(config: GPTConfig, *, documents: bool, device_type: str, compiled: bool, drops: bool) -> Kernel:
    """The fastest way that is right for a forward pass.

    Args:
        config: The model.
        documents: Whether tokens see their own document only.
        device_type: ``cuda`` or another.
        compiled: Whether the blocks are compiled: FlexAttention is a kernel only then.
        drops: Whether attention weights are dropped in this pass.
    """
    if config.attention_kernel == "explicit" or config.qk_layer_scaling == "megatron":
        return "explicit"
    capped, biased = config.attention_soft_cap is not None, config.position == "alibi"
    if not (capped or biased or documents):
        return "sdpa"
    if device_type == "cuda" and compiled and not drops and config.head_size >= _FLEX_HEAD_SIZE:
        return "flex"
    # On CUDA the kernels that take a bias take it in the dtype of the queries, which is too coarse for ALiBi.
    return "explicit" if capped or (biased and device_type == "cuda") else "masked"


@dataclass(frozen=True)
class ScoreRules:
    """How scores come from queries and keys, the same in all layers of a model."""

    scale: float | None
    """Factor on the product; ``None``: 1/sqrt(K)."""
    pre_sqrt: bool
    """Root of the scale on queries and on keys instead."""
    layer_scaling: LayerScaling
    soft_cap: float | None

    @classmethod
    def of(cls, config: GPTConfig) -> ScoreRules:
        """The rules of a model; cosines under `qk_norm: l2` are scaled where they are made."""
        scale = 1.0 if config.qk_norm == "l2" else None
        return cls(scale, config.attention_scale == "pre_sqrt", config.qk_layer_scaling, config.attention_soft_cap)


@dataclass
class Past:
    """What each query sees, for one forward pass. Held by a plain object: see `AttentionContext`."""

    kernel: Kernel
    mask: torch.Tensor | None = None
    """masked, explicit: bool (B or 1, 1, T, T), or fp32 (B or 1, H, T, T) with ALiBi added and -inf where hidden."""
    blocks: BlockMask | None = None
    """flex: which blocks of scores are computed."""
    slopes: torch.Tensor | None = None
    """flex: ALiBi's slopes (H,)."""

    def of(self, heads: slice) -> Past:
        """What some of the heads see: their part of what differs from head to head."""
        mask = self.mask if self.mask is None or self.mask.shape[1] == 1 else self.mask[:, heads]
        return replace(self, mask=mask, slopes=None if self.slopes is None else self.slopes[heads])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rules: ScoreRules,
    past: Past,
    layer: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention: q (B, H, T, K), k and v (B, G, T, K) -> (B, H, T, K), all of one dtype.

    Args:
        rules: How scores are made.
        past: What each query sees, and the kernel.
        layer: Number of the layer from 1, a 0-d fp32 tensor; ``None``: no layer scaling.
        dropout: Probability of dropping an attention weight in this pass.
    """
    scale = rules.scale
    if rules.pre_sqrt:
        root = q.shape[-1] ** -0.25
        q, k, scale = q * root, k * root, 1.0
    if layer is not None:
        q = (q.float() / layer).to(q.dtype)
    if past.kernel == "explicit":
        restored = layer if rules.layer_scaling == "megatron" else None
        return _explicit(q, k, v, scale, restored, rules.soft_cap, past.mask, dropout)
    if past.kernel == "flex":
        return _flex(q, k, v, scale, rules.soft_cap, past)
    grouped = q.shape[1] != k.shape[1]
    if grouped and not _knows_groups(q, past.kernel):
        k, v, grouped = _repeated(k, q), _repeated(v, q), False
    mask, causal = past.mask, past.kernel == "sdpa"
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)


def _knows_groups(q: torch.Tensor, kernel: Kernel) -> bool:
    # On CUDA flash knows groups; the memory-efficient kernel, which takes masks and fp32, does not.
    return q.device.type != "cuda" or (kernel == "sdpa" and q.dtype != torch.float32)


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Each key or value head once for every query head of its group: (B, G, T, K) -> (B, H, T, K)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    layer: torch.Tensor | None,
    cap: float | None,
    mask: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    product = q @ _repeated(k, q).transpose(-2, -1)  # (B, H, T, T), rounded to the dtype of q
    scores = product.float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if layer is not None:
        scores = scores * layer
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    assert mask is not None
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(scores.softmax(-1), dropout).to(v.dtype)
    return weights @ _repeated(v, q)


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, cap: float | None, past: Past
) -> torch.Tensor:
    slopes = past.slopes

    def modify(score: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if slopes is None else score + slopes[head] * (key - query)

    grouped = q.shape[1] != k.shape[1]
    y: torch.Tensor = flex_attention(q, k, v, modify, past.blocks, scale, grouped)
    return y
