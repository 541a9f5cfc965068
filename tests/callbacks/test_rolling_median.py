from __future__ import annotations

import math
import random
import statistics

import pytest

from lit_stable.callbacks.rolling_median import RollingMedian


def test_rolling_median_and_spread_are_those_of_the_last_values() -> None:
    source = random.Random(1)
    window, seen = RollingMedian(7), []
    for _ in range(40):
        seen.append(source.choice([0.0, 1.0, 2.5, source.random()]))
        window.push(seen[-1])
        window.push(math.nan)
        last = seen[-7:]
        middle = statistics.median(last)
        assert window.median() == middle
        assert window.spread() == pytest.approx(1.4826 * statistics.median(abs(v - middle) for v in last))


def test_an_empty_window_has_no_median() -> None:
    assert math.isnan(RollingMedian(3).median())
