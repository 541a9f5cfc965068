from __future__ import annotations

import math

from lit_stable.callbacks.stragglers import Late, SlowStep, UsualTime, latest, steady


def test_the_latest_is_compared_with_the_usual_rank() -> None:
    assert latest([0.1, 0.3]) == Late(1, 0.3 - 0.1)
    assert latest([0.3, 0.1]) == Late(0, 0.3 - 0.1)
    assert latest([0.1, 0.11, 0.5, 0.12]) == Late(2, 0.5 - 0.11)
    assert latest([0.7]) == Late(0, 0.0)


def test_a_slow_step_is_the_worst_above_factor_and_margin() -> None:
    usual = UsualTime()
    assert usual.slowest([0.1] * 10, 2.0, 0.05) is None
    assert usual.slowest([0.1, 0.3, 0.9, 0.1], 2.0, 0.05) == SlowStep(2, 0.9, 0.1)
    assert usual.slowest([0.21], 2.0, 0.2) is None  # twice as long, and yet but a tenth of a second more


def test_nothing_is_slow_before_it_is_known_what_is_usual() -> None:
    usual = UsualTime(fewest=5)
    assert usual.slowest([0.1, 9.0, 0.1, 0.1], 2.0, 0.1) is None


def test_a_step_that_is_not_judged_teaches_nothing() -> None:
    usual = UsualTime(window=10, fewest=3)
    assert usual.slowest([math.nan] * 20, 2.0, 0.1) is None
    assert usual.slowest([0.1, 0.1, 0.1, math.nan, 0.5], 2.0, 0.1) == SlowStep(4, 0.5, 0.1)


def test_a_new_level_is_the_usual_one_after_half_a_window() -> None:
    usual = UsualTime(window=10)
    usual.slowest([0.1] * 10, 2.0, 0.05)
    assert usual.slowest([1.0], 2.0, 0.05) is not None
    usual.slowest([1.0] * 6, 2.0, 0.05)
    assert usual.slowest([1.0], 2.0, 0.05) is None


def test_a_rank_is_a_straggler_when_it_is_late_in_most_steps() -> None:
    late = [Late(1, 0.2), Late(1, 0.4), Late(0, 0.01), Late(1, 0.3), None]
    found = steady(late, 0.1)
    assert found is not None
    assert found.rank == 1
    assert abs(found.seconds - 0.3) < 1e-9
    assert steady([Late(1, 0.2), Late(0, 0.2), Late(1, 0.01), Late(0, 0.2)], 0.1) is None
    assert steady([Late(1, 0.2), Late(1, 0.2)], 0.1) is None  # too few to say
    assert steady([], 0.1) is None
