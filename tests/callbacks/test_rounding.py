from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lit_stable.callbacks.rounding import least_rate, warn_of_rounding


def gain_after(steps: int, rate: float, dtype: torch.dtype) -> float:
    gain = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.Adam([gain], lr=rate)
    for _ in range(steps):
        gain.grad = torch.ones_like(gain)
        optimizer.step()
    return gain.item()


def test_the_least_rate_is_where_a_gain_begins_to_move() -> None:
    least = least_rate(torch.bfloat16)
    assert least == 1 / 512
    assert gain_after(50, least * 0.95, torch.bfloat16) == 1.0
    assert gain_after(50, least * 1.05, torch.bfloat16) < 1.0
    assert gain_after(50, 1e-3, torch.float32) < 1.0


def rounding_warnings(optimizer: torch.optim.Optimizer, gain: nn.Parameter) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_rounding([optimizer], {gain})
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_warns_when_the_peak_rate_is_below_it(dtype: torch.dtype) -> None:
    gain = nn.Parameter(torch.ones(1, dtype=dtype))
    low = least_rate(dtype) / 2
    (said,) = rounding_warnings(torch.optim.AdamW([gain], lr=low), gain)
    assert f"1 norm gains are stored in {dtype} and the learning rate is at most {low:g}" in said
    assert rounding_warnings(torch.optim.AdamW([gain], lr=4 * low), gain) == []


def test_the_peak_is_not_the_rate_of_a_warm_up() -> None:
    gain = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([gain], lr=1e-2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10_000)
    assert rounding_warnings(optimizer, gain) == []
    optimizer = torch.optim.AdamW([gain], lr=1e-2)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
    assert rounding_warnings(optimizer, gain) == []


def test_says_nothing_of_fp32_gains_other_parameters_or_other_optimizers() -> None:
    fine, coarse = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    assert rounding_warnings(torch.optim.AdamW([fine, coarse], lr=1e-4), fine) == []
    assert rounding_warnings(torch.optim.SGD([coarse], lr=1e-4), coarse) == []
