from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import HalfPrecision
from torch import Tensor

from lit_stable.callbacks import attention_logits
from lit_stable.callbacks.attention_logits import AttentionCalls, largest_logits


def by_hand(q: Tensor, k: Tensor, scale: float, allowed: Tensor) -> float:
    """One pair after the other."""
    best = -math.inf
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                for j in range(k.shape[2]):
                    if allowed[i, j]:
                        key = k[b, h * k.shape[1] // q.shape[1], j]
                        best = max(best, float((q[b, h, i].double() * key.double()).sum()) * scale)
    return best


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("at_once", [1 << 26, 30, 7])
def test_the_largest_of_all_pairs_that_attend(
    groups: int, causal: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_logits, "_ELEMENTS", at_once)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, groups, 5, 8)
    allowed = torch.ones(5, 5, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    expected = by_hand(q, k, 8**-0.5, allowed)
    found = largest_logits(q, k, None, causal)
    assert float(found.amax()) == pytest.approx(expected, rel=1e-6)
    for head in range(4):
        own = slice(head, head + 1), slice(head * groups // 4, head * groups // 4 + 1)
        assert float(found[head]) == pytest.approx(by_hand(q[:, own[0]], k[:, own[1]], 8**-0.5, allowed), rel=1e-6)


def test_a_pair_that_does_not_attend_does_not_count() -> None:
    q, k = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    q[0, 0, 0, 0] = k[0, 0, 2, 0] = 10.0  # the first query, the last key
    assert float(largest_logits(q, k, 1.0, is_causal=True)) == 0.0
    assert float(largest_logits(q, k, 1.0, is_causal=False)) == 100.0
    hidden = torch.ones(3, 3, dtype=torch.bool)
    hidden[0, 2] = False
    assert float(largest_logits(q, k, 1.0, is_causal=False, mask=hidden)) == 0.0
    assert float(largest_logits(q, k, 1.0, is_causal=False, mask=torch.full((1, 1, 3, 3), 5.0))) == 105.0


def test_bf16_products_are_made_in_fp32() -> None:
    q = torch.full((1, 1, 1, 3), 1.0).bfloat16()
    k = torch.tensor([256.0, 1.0, 1.0]).view(1, 1, 1, 3).bfloat16()
    assert float(largest_logits(q, k, 1.0)) == 258.0  # bf16 has no 257
    with HalfPrecision("bf16-true").forward_context():  # new tensors are bf16 in it
        found = largest_logits(q + torch.tensor([0.0, 1.0, 0.0]), k, 1.0)
    assert (float(found), found.dtype) == (259.0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # as a step in bf16-mixed is measured
        assert float(largest_logits(q, k, 1.0)) == 258.0
        assert float(largest_logits(q.float(), k.float() + torch.tensor([1.0, 0.0, 0.0]), 1.0)) == 259.0


def test_what_is_not_a_number_is_not_hidden() -> None:
    q, k = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    q[0, 0, 1, 0] = math.nan
    assert math.isnan(float(largest_logits(q, k)))


def test_every_call_of_the_fused_function_is_seen_and_computes_what_it_would() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    mask = torch.ones(4, 4, dtype=torch.bool)
    plain = F.scaled_dot_product_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    seen = []
    with AttentionCalls(lambda *call: seen.append(call)):
        watched = (
            F.scaled_dot_product_attention(q, k, v, mask),
            torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True, scale=None),
        )
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [(c[0] is q, c[1] is k, *c[2:4], c[4] is mask) for c in seen] == [
        (True, True, None, False, True),
        (True, True, None, True, False),
    ]
