from __future__ import annotations

import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_stable.callbacks.z_clip import NormStatistics, ZClip


def fed(norms: list[float], **options: float) -> NormStatistics:
    statistics = NormStatistics(ZClip(**options))  # type: ignore[arg-type]
    statistics.begin(["all"], torch.device("cpu"))
    for norm in norms:
        judge(statistics, norm)
    return statistics


def judge(statistics: NormStatistics, norm: float) -> tuple[float, float]:
    norms = torch.tensor([norm])
    limit, level = statistics.judge(norms, norms[0], torch.tensor(True))
    return limit.item(), level.item()


def test_the_warm_up_takes_the_exact_mean_and_variance_and_judges_nothing() -> None:
    statistics = fed([], warmup_steps=4)
    assert [judge(statistics, norm) for norm in (1.0, 2.0, 3.0, 6.0)] == [(math.inf, math.inf)] * 4
    # mean 3, population variance (4 + 1 + 0 + 9) / 4
    assert statistics.values.flatten().tolist() == pytest.approx([4.0, 3.0, 3.5], rel=1e-6)


def test_an_outlier_is_clipped_by_the_papers_reciprocal_rule_and_enters_at_that_value() -> None:
    statistics = fed([1.0, 3.0], warmup_steps=2, z_threshold=2.0, decay=0.9)  # mean 2, spread 1
    limit, level = judge(statistics, 12.0)  # z = 10: clipped to 2 + 2 * 1 * 2 / 10
    assert (limit, level) == pytest.approx((2.4, 4.0), rel=1e-6)
    mean = 0.9 * 2 + 0.1 * 2.4
    assert statistics.values.flatten().tolist() == pytest.approx(
        [2.0, mean, 0.9 * 1 + 0.1 * (2.4 - mean) ** 2], rel=1e-6
    )


def test_the_farther_out_the_lower_the_limit() -> None:
    limits = [judge(fed([1.0, 3.0], warmup_steps=2), norm)[0] for norm in (5.0, 50.0, 5e6)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] == pytest.approx(2.0, rel=1e-4)  # the mean


def test_an_ordinary_norm_is_left_as_it_is_and_enters_the_averages() -> None:
    statistics = fed([1.0, 3.0], warmup_steps=2, decay=0.9)
    assert judge(statistics, 4.0)[0] == math.inf
    assert statistics.values[1].item() == pytest.approx(0.9 * 2 + 0.1 * 4, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("before", [0, 1, 30], ids=["first", "warming_up", "warm"])
def test_a_norm_that_is_not_finite_enters_nothing(bad: float, before: int) -> None:
    statistics = fed([1.0 + 0.1 * (i % 3) for i in range(before)])
    known = statistics.values.clone()
    judge(statistics, bad)
    assert torch.equal(statistics.values, known)


def test_a_spike_after_a_spike_and_after_a_nan_is_still_caught() -> None:
    statistics = fed([1.0 + 0.1 * (i % 3) for i in range(40)])
    assert [judge(statistics, norm)[0] < 2 for norm in (50.0, math.nan, 25.0)] == [True, False, True]


def test_a_flat_history_does_not_make_a_small_rise_an_outlier() -> None:
    assert judge(fed([1.0] * 40), 1.0001)[0] == math.inf
    assert judge(fed([1.0] * 40), 1.02)[0] == math.inf
    assert judge(fed([1.0] * 40), 1.5)[0] < 1.5


def test_norms_of_zero_do_not_make_it_clip_to_zero() -> None:
    assert judge(fed([0.0] * 40), 1.0)[0] == math.inf


def test_few_steps_of_a_healthy_run_are_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    norms = (torch.randn(2000, generator=generator) * 0.1 + 1).tolist()
    statistics = fed([])
    clipped = sum(judge(statistics, norm)[0] < math.inf for norm in norms)
    assert 0 < clipped < 0.03 * len(norms)  # 0.6 % of a normal distribution lie beyond 2.5 deviations, more of an EMA's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"z_threshold": 0.0}, r"`ZClip\(z_threshold=0.0\)`: must be a finite number > 0"),
        ({"z_threshold": math.nan}, r"`ZClip\(z_threshold=nan\)`: must be a finite"),
        ({"decay": 1.0}, r"`ZClip\(decay=1.0\)`: must lie between 0 and 1"),
        ({"warmup_steps": 1}, r"`ZClip\(warmup_steps=1\)`: must be at least 2"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        ZClip(**options)  # type: ignore[arg-type]
