"""The kernel of the GELU and its derivative against fp64; who takes it, and what is kept for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lit_stable.model.config import GPTConfig
from lit_stable.model.gelu import gelu
from lit_stable.model.mlp import build_mlp

pytestmark = pytest.mark.gpu
Function = Callable[[torch.Tensor], torch.Tensor]


def gelu_and_slope(x: torch.Tensor, function: Function) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    result = function(x)
    result.sum().backward()
    assert x.grad is not None
    return result.detach(), x.grad


@pytest.mark.parametrize("function", [gelu, torch.compile(gelu)], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_is_rounded_once(dtype: torch.dtype, function: Function) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).cuda()
    x = x[x.isfinite() & (x.abs() < 30)]  # their number is no multiple of a tile
    half = torch.finfo(dtype).eps / 2
    for ours, exact in zip(gelu_and_slope(x, function), gelu_and_slope(x.double(), F.gelu), strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - exact).abs()
        assert (error <= (half + 1e-5) * exact.abs() + 3e-6).all()


def test_it_keeps_what_the_library_loses() -> None:
    x = torch.tensor([-5.5, -6.0], device="cuda").bfloat16()
    exact = x.double() * torch.erfc(-x.double() / math.sqrt(2)) / 2
    torch.testing.assert_close(gelu(x).double(), exact, rtol=4e-3, atol=0)


def test_what_is_not_finite_stays_so_and_very_large_numbers_are_finite() -> None:
    result = gelu(torch.tensor([math.inf, math.nan, 3e38, -3e38], device="cuda").bfloat16())
    assert result.isinf().tolist() == [True, False, False, False]
    assert result.isnan().tolist() == [False, True, False, False]
    assert result[3] == 0


def test_fp32_is_the_librarys_and_shapes_and_strides_are_any() -> None:
    x = torch.randn(40, 30, 20, device="cuda")
    assert torch.equal(gelu(x), F.gelu(x))
    turned = x.bfloat16().transpose(0, 2)
    for ours, theirs in zip(gelu_and_slope(turned, gelu), gelu_and_slope(turned, F.gelu), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=1e-5)
    assert gelu(x[:0].bfloat16()).shape == (0, 30, 20)


def test_a_compiled_mlp_learns_as_the_one_that_is_not() -> None:
    torch.manual_seed(0)
    mlp = build_mlp(GPTConfig(d_model=64, n_head=2, mlp="gelu")).cuda()
    x = torch.randn(8, 128, 64, device="cuda")
    found = []
    for function in (mlp, torch.compile(mlp)):
        with torch.autocast("cuda", torch.bfloat16):
            function(x).float().square().mean().backward()
        found.append([parameter.grad.clone() for parameter in mlp.parameters() if parameter.grad is not None])
        mlp.zero_grad()
    for eager, compiled in zip(*found, strict=True):
        assert (eager - compiled).norm() < 5e-3 * eager.norm()


def test_many_compiled_in_one_graph_keep_16_bits_each() -> None:
    """Left to the compiler, the derivative would be made forwards and kept in fp32, from the tenth block or so on."""
    layers = torch.nn.Sequential(*(build_mlp(GPTConfig(d_model=256, n_head=2, mlp="gelu")) for _ in range(12))).cuda()
    x = torch.randn(2**14, 256, device="cuda")
    run = torch.compile(layers)
    with torch.autocast("cuda", torch.bfloat16):
        run(x).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        kept = run(x)
    each = 2 * 2**14 * 4 * 256  # bytes of what lies between the matrices: before the GELU, and behind it
    assert torch.cuda.memory_allocated() - before < 12 * (2 * each + each // 2)
    del kept
