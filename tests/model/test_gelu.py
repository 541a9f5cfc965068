"""The polynomial of the short GELU against fp64; that on a CPU the GELU is the library's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lit_stable.model.gelu import LOG2_TAIL, gelu

HALF_LOG2_E = math.log2(math.e) / 2


def short_share(x: torch.Tensor) -> torch.Tensor:
    """What the kernel computes, in fp32: the normal distribution's share below x."""
    log2_tail = torch.full_like(x, LOG2_TAIL[-1])
    for coefficient in LOG2_TAIL[-2::-1]:
        log2_tail = log2_tail * x.abs() + coefficient
    tail = torch.exp2(log2_tail - x * x * HALF_LOG2_E)
    return torch.where(x >= 0, 1 - tail, tail)


def exact_share(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.erfc(-x.double() / math.sqrt(2))


def test_the_share_is_that_of_the_normal_distribution():
    x = torch.linspace(-60, 60, 1_200_001)
    error = (short_share(x).double() - exact_share(x)).abs()
    assert error.max() < 2e-6
    tail = (x < 0) & (x > -6)
    assert (error / exact_share(x))[tail].max() < 1e-5
    assert (error * x.abs())[x < -6].max() < 1e-12


def test_far_out_it_is_zero_or_one_and_what_is_no_number_stays_so():
    x = torch.tensor([-math.inf, -3e38, 3e38, math.inf, math.nan])
    assert short_share(x)[:4].tolist() == [0, 0, 1, 1]
    assert short_share(x)[4].isnan()


def test_in_bf16_it_is_no_further_off_than_the_librarys():
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    x = numbers[numbers.isfinite() & (numbers.abs() < 30)]
    exact = x.double() * exact_share(x)
    ours, theirs = ((y.double() - exact).abs() for y in ((x * short_share(x.float())).bfloat16(), F.gelu(x)))
    assert (ours <= theirs + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_cpu_it_is_the_librarys(compiled, dtype):
    x = torch.randn(100).to(dtype)
    assert torch.equal((torch.compile(gelu, backend="eager") if compiled else gelu)(x), F.gelu(x))
