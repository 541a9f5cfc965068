"""The MLPs against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from lit_stable.model.config import GPTConfig
from lit_stable.model.mlp import MLP, SwiGLUMLP, build_mlp

ROOT = math.sqrt(2 / math.pi)
FORMULAS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
}


def config(**fields) -> GPTConfig:
    return GPTConfig(d_model=8, n_head=2, d_ff=5, **fields)


def test_swiglu_equals_the_formula():
    torch.manual_seed(0)
    mlp = build_mlp(config(mlp="swiglu"))
    assert type(mlp) is SwiGLUMLP
    x = torch.randn(3, 4, 8)
    gate = x @ mlp.gate.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("kind", FORMULAS)
def test_each_activation_equals_its_formula(kind):
    torch.manual_seed(0)
    mlp = build_mlp(config(mlp=kind, bias=True))
    assert type(mlp) is MLP
    x = 3 * torch.randn(3, 4, 8)
    up = x @ mlp.up.weight.T + mlp.up.bias
    expected = FORMULAS[kind](up) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected)
    for other, formula in FORMULAS.items():  # the two GELUs differ by 5e-4 at most
        if other != kind:
            assert not torch.allclose(mlp(x), formula(up) @ mlp.down.weight.T + mlp.down.bias, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_normformer_norms_what_the_last_matrix_reads(kind):
    mlp = build_mlp(config(mlp=kind, norm_position="normformer", norm_eps=1e-12))
    seen = []
    mlp.down.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mlp(torch.randn(3, 4, 8))
    torch.testing.assert_close(seen[0].mean(-1), torch.zeros(3, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen[0].square().mean(-1), torch.ones(3, 4))
    assert mlp.inner_norm.weight.shape == (5,)
