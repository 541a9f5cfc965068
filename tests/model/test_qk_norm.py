"""Unit length of queries and keys, and the scale that goes with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lit_stable.model.attention import Attention
from lit_stable.model.attention_context import AttentionContext
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise
from lit_stable.model.norm import is_norm_or_gain
from lit_stable.model.qk_norm import CosineScale, L2Norm, build_qk_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_length_is_one_whatever_comes_in(dtype, size):
    torch.manual_seed(0)
    y = L2Norm()((size * torch.randn(2, 3, 4, 16)).to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float().norm(dim=-1), torch.ones(2, 3, 4), atol=1e-2, rtol=0)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_logit_is_at_most_the_root_of_the_heads_size_times_both_gains(kind):
    """Each vector has length sqrt(K) x gain at most, so a product over sqrt(K) has sqrt(K) x gain^2."""
    config = GPTConfig(n_head=2, d_model=32, vocab_size=8, max_length=64, qk_norm=kind, norm_eps=1e-12)
    attention = Attention(config)
    with torch.no_grad():
        attention.qkv.weight.copy_(1e3 * torch.randn(attention.qkv.weight.shape))
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(2.0)
        assert attention.qkv(torch.randn(1, 64, 32)).std() > 1e3
        x = torch.randn(1, 64, 32)
        q, k, scale, _ = attention.queries_keys(x, AttentionContext(config, 64, None, "sdpa", x.device))
    bound = 16**0.5 * 2**2
    logits = scale * q @ k.transpose(-1, -2)
    assert logits.abs().max() <= bound * (1 + 1e-5)
    assert (scale * q * q).sum(-1).max() == pytest.approx(bound, rel=1e-4)  # two vectors of one direction reach it


def test_length_is_taken_in_fp32():
    x = torch.full((1, 64), 30000.0).half()  # of length 240 000, which fp16 does not hold
    torch.testing.assert_close(L2Norm()(x), torch.full((1, 64), 0.125).half())


def test_learned_scale_starts_at_its_law_and_gets_a_gradient():
    config = GPTConfig(vocab_size=10, n_layer=2, n_head=2, d_model=16, max_length=8, qk_norm="l2")
    gpt = GPT(config)
    initialise(gpt, 0)
    scales = [block.attention.qk_scale.scale for block in gpt.blocks]
    assert [scale.item() for scale in scales] == pytest.approx(2 * [math.log2(56)])
    gpt(torch.arange(8)[None]).square().sum().backward()
    assert all(scale.grad.item() != 0 for scale in scales)


def test_fixed_scale_is_no_parameter():
    scale = CosineScale(GPTConfig(qk_norm="l2", qk_l2_scale=8.0))
    assert not list(scale.parameters())
    assert torch.equal(scale(torch.ones(2, 4)), torch.full((2, 4), 8.0))


def test_the_scale_is_kept_whole_and_in_fp32_as_norms_are():
    assert is_norm_or_gain(CosineScale(GPTConfig(qk_norm="l2")))


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("none", [nn.Identity] * 3),
        ("layernorm", [nn.LayerNorm, nn.LayerNorm, nn.Identity]),
        ("rmsnorm", [nn.RMSNorm, nn.RMSNorm, nn.Identity]),
        ("l2", [L2Norm, L2Norm, CosineScale]),
    ],
)
def test_each_kind_builds_its_norms(kind, types):
    assert all(map(isinstance, build_qk_norms(GPTConfig(qk_norm=kind)), types))
