from __future__ import annotations

import math
import re
from typing import Any

import pytest

from lit_stable.callbacks.rate_change import RateChange
from lit_stable.optim.schedule import LRSchedule

# The 104B run of BigScience: cosine in samples, and its override at 1,519,744 samples.
WARMUP, HORIZON, PEAK, FLOOR = 216_320, 126_953_125, 6e-5, 6e-6


def test_the_golden_override_of_horizon_and_floor() -> None:
    before = RateChange(peak=PEAK, floor=FLOOR, horizon=HORIZON, warmup=WARMUP)
    after = RateChange(floor=6e-7, horizon=12_695_312, warmup=WARMUP)
    assert f"{before.rate(1_519_744, 0.0, PEAK, PEAK):.4e}" == "5.9986e-05"
    assert f"{after.rate(1_519_744, 0.0, PEAK, PEAK):.4e}" == "5.8415e-05"
    assert f"{before.rate(7_594_208, 0.0, PEAK, PEAK):.4e}" == "5.9550e-05"


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_a_new_schedule_equals_the_applications_own(shape: Any) -> None:
    own = LRSchedule(peak=3e-4, shape=shape, floor=1e-5, warmup=100, horizon=1000)
    change = RateChange(peak=3e-4, shape=shape, floor=1e-5, warmup=100, horizon=1000)
    assert [change.rate(n, 0.0, 1.0, 1.0) for n in range(1200)] == [own.lr(n) for n in range(1200)]


def test_a_factor_is_exact_and_a_peak_scales_the_schedule() -> None:
    assert RateChange(factor=2 / 3).rate(5, 3e-4, 1.0, 1.0) == 3e-4 * (2 / 3)
    change = RateChange(peak=4e-5)
    assert change.rate(5, 6e-5, 6e-5, 6e-5) == 4e-5
    assert change.rate(5, 3e-5, 6e-5, 6e-5) == pytest.approx(2e-5)


@pytest.mark.parametrize(
    "change",
    [
        RateChange(factor=0.5),
        RateChange(peak=0.3),
        RateChange(floor=0.9),
        RateChange(peak=0.3, floor=0.1, horizon=10),
        RateChange(points=[(0, 0.1), (10, 0.2)]),
    ],
)
def test_groups_keep_their_ratio(change: RateChange) -> None:
    high, low = (change.rate(3, 0.4 * base, base, 1.0) for base in (1.0, 0.2))
    assert low == pytest.approx(0.2 * high)


def test_a_floor_alone_is_a_lower_bound() -> None:
    assert [RateChange(floor=0.2).rate(0, lr, 1.0, 1.0) for lr in (0.1, 0.5)] == [0.2, 0.5]
    assert RateChange(factor=0.1, floor=0.2).rate(0, 1.0, 1.0, 1.0) == 0.2


def test_points_are_joined_by_lines_and_flat_outside() -> None:
    change = RateChange(points=[(10, 1.0), (20, 2.0), (40, 0.0)])
    assert [change.rate(n, 9.0, 1.0, 1.0) for n in (0, 10, 15, 20, 30, 40, 99)] == [1.0, 1.0, 1.5, 2.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"factor": -0.5}, "factor=-0.5: must be a finite number >= 0"),
        ({"factor": math.nan}, "factor=nan: must be"),
        ({"peak": 0.0}, "peak=0.0: must be a finite number > 0"),
        ({"floor": math.inf}, "floor=inf: must be"),
        ({"peak": 1.0, "floor": 2.0}, "floor=2.0: must be at most peak=1.0"),
        ({"factor": 0.5, "warmup": 5}, "warmup=5: belongs to a new schedule; give horizon"),
        ({"horizon": 5, "warmup": 5}, "warmup=5: must lie between 0 and horizon=5"),
        ({"factor": 0.5, "peak": 1.0}, "factor=0.5: scales .* without peak and horizon"),
        ({"points": [(0, 1.0)], "peak": 1.0}, "schedule: is all of the new schedule"),
        ({"points": []}, r"schedule=\[\]: must be \[progress, rate\] pairs"),
        ({"points": [(5, 1.0), (5, 2.0)]}, "rising progress"),
        ({"points": [(5, -1.0)]}, "pairs >= 0"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], phrase: str) -> None:
    problems = RateChange(**options).problems()
    assert len(problems) == 1
    assert re.search(phrase, problems[0])


def test_nothing_is_wrong_with_what_is_right() -> None:
    assert RateChange(peak=1.0, floor=0.1, horizon=10, warmup=2, shape="linear").problems() == []
    assert RateChange(factor=0.0).problems() == []
