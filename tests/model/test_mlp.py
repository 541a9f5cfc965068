"""The MLPs against their formulas."""

from __future__ import annotations

import math

import torch

from lit_stable.model.config import GPTConfig
from lit_stable.model.mlp import GELUMLP, SwiGLUMLP


def test_swiglu_equals_the_formula():
    torch.manual_seed(0)
    mlp = SwiGLUMLP(GPTConfig(d_model=8, n_head=2, mlp="swiglu", d_ff=5))
    x = torch.randn(3, 4, 8)
    gate = x @ mlp.gate.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * (x @ mlp.up.weight.T)) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected)


def test_gelu_is_the_exact_one():
    torch.manual_seed(0)
    mlp = GELUMLP(GPTConfig(d_model=8, n_head=2, d_ff=5, bias=True))
    x = torch.randn(3, 4, 8)
    up = x @ mlp.up.weight.T + mlp.up.bias
    expected = up * 0.5 * (1 + torch.erf(up / math.sqrt(2))) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected)
