"""Closed forms against the module itself."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import flops_per_token, parameter_breakdown, parameter_count
from lit_stable.model.gpt import GPT

OPTIONS = {
    "norm": ["layernorm", "rmsnorm"],
    "mlp": ["gelu", "swiglu"],
    "position": ["learned", "rope"],
    "qk_norm": ["none", "layernorm", "rmsnorm"],
    "embed_norm": [False, True],
    "tied": [True, False],
    "bias": [False, True],
}
PARTS = {
    "token_embedding": "wte.",
    "position_embedding": "wpe.",
    "embedding_norm": "embed_norm.",
    "attention": "attention.qkv. attention.out.",
    "qk_norms": "q_norm. k_norm.",
    "mlp": ".mlp.",
    "block_norms": "attention_norm. mlp_norm.",
    "head": "head.",
}


def part_of(name: str) -> str:
    return next((part for part, keys in PARTS.items() if any(key in name for key in keys.split())), "final_norm")


def test_parameters_equal_the_module_part_by_part_for_all_options():
    for values in itertools.product(*OPTIONS.values()):
        config = GPTConfig(
            vocab_size=50, n_layer=2, n_head=3, d_model=12, max_length=7, **dict(zip(OPTIONS, values, strict=True))
        )
        with torch.device("meta"):
            gpt = GPT(config)
        counted = dict.fromkeys(parameter_breakdown(config), 0)
        for name, param in gpt.named_parameters():
            counted[part_of(name)] += param.numel()
        assert counted == parameter_breakdown(config), config
        assert sum(param.numel() for param in gpt.parameters()) == parameter_count(config)


def test_gpt2_small_has_its_published_size():
    # 124 439 808 (Radford et al. 2019, with the size corrected in the repository).
    assert parameter_count(GPTConfig(vocab_size=50257, bias=True)) == 124_439_808


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_three_times_the_counted_forward_pass(mlp, tied):
    config = GPTConfig(vocab_size=50, n_layer=2, n_head=3, d_model=12, max_length=16, mlp=mlp, tied=tied, bias=True)
    gpt, ids = GPT(config), torch.zeros(4, 16, dtype=torch.long)
    # The plain kernel, because not every fused one reports its FLOPs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt(ids)
    assert 3 * counter.get_total_flops() == 4 * 16 * flops_per_token(config, 16)


def test_flops_by_hand():
    # One block of width 2: attention 4*4, MLP 2*2*8, head 5*2 weights; 6 * 58 + 12 * 1 * 2 * 3.
    config = GPTConfig(vocab_size=5, n_layer=1, n_head=1, d_model=2, max_length=3)
    assert flops_per_token(config, 3) == 420
