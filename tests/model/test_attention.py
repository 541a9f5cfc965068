"""Attention against the formula, head by head."""

from __future__ import annotations

import math

import pytest
import torch

from lit_stable.model.attention import Attention
from lit_stable.model.config import GPTConfig
from lit_stable.model.rotary import Rotary


def by_hand(attention: Attention, x: torch.Tensor, heads: int, rope: Rotary | None) -> torch.Tensor:
    size, (_, length, _) = attention.head_size, x.shape
    outputs = []
    for head in range(heads):
        rows = attention.qkv.weight[3 * size * head : 3 * size * (head + 1)]
        q, k, v = (x @ part.T for part in rows.split(size))
        q, k = attention.q_norm(q), attention.k_norm(k)
        if rope is not None:
            q, k = (rope.rotate(part[:, :, None])[:, :, 0] for part in (q, k))
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, -1) @ attention.out.weight.T


@pytest.mark.parametrize("qk_norm", ["none", "layernorm", "rmsnorm"])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_attention_equals_the_formula(qk_norm, position):
    torch.manual_seed(0)
    attention = Attention(GPTConfig(d_model=24, n_head=3, qk_norm=qk_norm, position=position))
    x = torch.randn(2, 7, 24)
    rope = Rotary(7, 8, 10000.0, x.device) if position == "rope" else None
    torch.testing.assert_close(attention(x, rope), by_hand(attention, x, 3, rope), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_qk_norm_bounds_queries_and_keys_per_head(kind):
    torch.manual_seed(0)
    attention = Attention(GPTConfig(d_model=32, n_head=4, qk_norm=kind))
    attention.qkv.weight.data.mul_(1000)
    seen = {}
    for name in ("q_norm", "k_norm"):
        getattr(attention, name).register_forward_hook(lambda _, args, y, name=name: seen.update({name: y}))
    attention(torch.randn(2, 5, 32), None)
    assert seen["q_norm"].shape == (2, 5, 4, 8)
    for y in seen.values():
        torch.testing.assert_close(y.square().mean(-1).sqrt(), torch.ones(2, 5, 4))
    logits = torch.einsum("bthk,bshk->bhts", seen["q_norm"], seen["k_norm"]) / math.sqrt(8)
    assert logits.max() <= math.sqrt(8) * (1 + 1e-5)
    assert attention.q_norm.weight.shape == (8,)  # one gain for all heads
