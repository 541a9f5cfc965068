"""Gradients of fp32 weights that leave their product in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lit_stable.model.linear import Linear

pytestmark = pytest.mark.gpu

TOKENS, INPUTS, OUTPUTS = 4096, 96, 160


def gradients(layer: nn.Linear, x: Tensor, by_output: Tensor, dtype: torch.dtype) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cuda", dtype):
        output = layer(x)
    assert output.dtype == dtype
    output.backward(by_output.to(dtype))
    return [grad for grad in (x.grad, *(p.grad for p in layer.parameters())) if grad is not None]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_weights_are_nearer_to_those_in_fp64(dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(1)
    ours = Linear(INPUTS, OUTPUTS, device="cuda")
    torchs = nn.Linear(INPUTS, OUTPUTS, device="cuda")
    torchs.load_state_dict(ours.state_dict())
    x, by_output = (
        torch.randn(2, TOKENS // 2, INPUTS, device="cuda"),
        torch.randn(2, TOKENS // 2, OUTPUTS, device="cuda"),
    )
    found = gradients(torch.compile(ours, fullgraph=True) if compiled else ours, x, by_output, dtype)
    narrow = gradients(torchs, x, by_output, dtype)
    rows = by_output.to(dtype).double().flatten(0, 1)
    exact = [rows.t() @ x.to(dtype).double().flatten(0, 1), rows.sum(0)]
    torch.testing.assert_close(
        found[0], narrow[0], rtol=0, atol=2 * torch.finfo(dtype).eps * float(narrow[0].abs().max())
    )
    for ours_, torchs_, exactly in zip(found[1:], narrow[1:], exact, strict=True):
        assert ours_.dtype == torch.float32
        largest = exactly.abs().max()
        assert (ours_ - exactly).abs().max() / largest < 1e-5
        assert (torchs_ - exactly).abs().max() / largest > 1e-4, "torch rounds no more: nothing is left to do here"


def test_sums_beyond_the_range_of_fp16_stay_finite() -> None:
    layer = Linear(8, 8, bias=False, device="cuda")
    x, by_output = torch.full((TOKENS, 8), 16.0, device="cuda"), torch.full((TOKENS, 8), 16.0, device="cuda")
    _, weight = gradients(layer, x, by_output, torch.float16)
    assert torch.equal(weight, torch.full_like(weight, 256.0 * TOKENS))


def test_outside_autocast_it_is_torchs_own() -> None:
    layer = Linear(8, 8, device="cuda")
    x = torch.randn(3, 8, device="cuda")
    assert type(layer(x).grad_fn) is type(nn.functional.linear(x, layer.weight, layer.bias).grad_fn)
