"""Closed forms against the module itself."""

from __future__ import annotations

import pytest
import torch
from any_gpt import any_options
from hypothesis import given, settings
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import flops_per_token, parameter_breakdown, parameter_count
from lit_stable.model.gpt import GPT

PARTS = {
    "token_embedding": "wte.",
    "position_embedding": "wpe.",
    "embedding_norm": "embed_norm.",
    "attention": "attention.qkv. attention.out.",
    "qk_norms": "q_norm. k_norm. qk_scale.",
    "head_scales": "head_scale.",
    "mlp_inner_norms": ".inner_norm.",
    "mlp": ".mlp.",
    "block_norms": "attention_norm. mlp_norm. attention_output_norm. mlp_output_norm.",
    "head": "head.",
}


def part_of(name: str) -> str:
    return next((part for part, keys in PARTS.items() if any(key in name for key in keys.split())), "final_norm")


@settings(max_examples=200, derandomize=True, deadline=None)
@given(options=any_options())
def test_parameters_equal_the_module_part_by_part_for_any_options(options):
    config = GPTConfig(**options)
    with torch.device("meta"):
        gpt = GPT(config)
    counted = dict.fromkeys(parameter_breakdown(config), 0)
    for name, param in gpt.named_parameters():
        counted[part_of(name)] += param.numel()
    assert counted == parameter_breakdown(config)
    assert sum(param.numel() for param in gpt.parameters()) == parameter_count(config)


@pytest.mark.parametrize(
    ("fields", "published"),
    [
        ({"vocab_size": 131072, "n_layer": 70, "n_head": 40, "d_model": 7680}, 50.56e9),  # BloombergGPT
        ({"vocab_size": 250880, "n_layer": 70, "n_head": 112, "d_model": 14336}, 176.25e9),  # BLOOM
    ],
)
def test_large_models_with_an_embedding_norm_and_alibi_have_their_published_sizes(fields, published):
    config = GPTConfig(**fields, bias=True, position="alibi", embed_norm=True)
    assert parameter_count(config) == pytest.approx(published, rel=1e-4)


def test_normformer_adds_what_the_paper_counts():
    # Per layer with biases: a norm of d_model and one of d_ff, gains and biases, and one factor per head.
    fields = {"vocab_size": 50, "n_layer": 3, "n_head": 4, "d_model": 16, "d_ff": 40, "bias": True}
    extra = parameter_count(GPTConfig(**fields, norm_position="normformer")) - parameter_count(GPTConfig(**fields))
    assert extra == 3 * (2 * 16 + 2 * 40 + 4)


def test_gpt2_small_has_its_published_size():
    # 124 439 808 (Radford et al. 2019, with the size corrected in the repository).
    assert parameter_count(GPTConfig(vocab_size=50257, bias=True)) == 124_439_808


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tied": False},
        {"mlp": "swiglu"},
        {"n_kv_head": 1, "mlp": "relu"},
        {"norm_position": "normformer"},
        {"qk_norm": "l2", "norm_position": "sandwich", "position": "alibi", "residual_fp32": True},
    ],
    ids=str,
)
def test_flops_are_three_times_the_counted_forward_pass(fields):
    config = GPTConfig(vocab_size=50, n_layer=2, n_head=3, d_model=12, max_length=16, bias=True, **fields)
    gpt, ids = GPT(config), torch.zeros(4, 16, dtype=torch.long)
    # The plain kernel, because not every fused one reports its FLOPs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt(ids)
    assert 3 * counter.get_total_flops() == 4 * 16 * flops_per_token(config, 16)


def test_flops_by_hand():
    # One block of width 2: attention 4*4, MLP 2*2*8, head 5*2 weights; 6 * 58 + 12 * 1 * 2 * 3.
    config = GPTConfig(vocab_size=5, n_layer=1, n_head=1, d_model=2, max_length=3)
    assert flops_per_token(config, 3) == 420
