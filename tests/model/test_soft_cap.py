"""The soft cap: bounded, nearly neutral for small values, in fp32."""

from __future__ import annotations

import math

import torch

from lit_stable.model.soft_cap import soft_cap


def test_values_and_gradient_by_hand():
    x = torch.tensor([-1e4, 0.3, 5.0], requires_grad=True)
    y = soft_cap(x, 5.0)
    expected = [5 * math.tanh(v / 5) for v in (-1e4, 0.3, 5.0)]
    torch.testing.assert_close(y, torch.tensor(expected))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([1 - math.tanh(v / 5) ** 2 for v in (-1e4, 0.3, 5.0)]))


def test_small_values_pass():
    x = torch.linspace(-0.5, 0.5, 11)
    torch.testing.assert_close(soft_cap(x, 30.0), x, atol=1e-4, rtol=0)


def test_bf16_is_capped_in_fp32():
    x = torch.linspace(-100, 100, 999).bfloat16()
    assert torch.equal(soft_cap(x, 50.0), (50 * torch.tanh(x.double() / 50)).bfloat16())
    assert not torch.equal(soft_cap(x, 50.0), 50 * torch.tanh(x / 50))
