from __future__ import annotations

import math

from lit_stable.callbacks.loss_band import LossBand


def band(values: list[float]) -> LossBand:
    found = LossBand()
    for value in values:
        found.observe(value, accept=True)
    return found


def test_level_and_spread_are_robust_and_spread_has_a_floor() -> None:
    found = band([2.0] * 20)
    assert (found.level, found.spread) == (2.0, 0.02)
    found.observe(900.0, accept=False)
    assert found.level == 2.0


def test_inside_is_the_median_of_five_and_all_finite() -> None:
    found = band([2.0] * 20)
    for value in (9.0, 9.0, 2.0, 2.01, 2.02):
        found.observe(value, accept=False)
    assert found.is_inside(1.0, found.level, found.spread)
    found.observe(9.0, accept=False)
    assert not found.is_inside(0.5, found.level, found.spread)
    found.observe(math.nan, accept=False)
    assert not found.is_inside(1e9, found.level, found.spread)


def test_a_young_band_asks_for_finite_losses_alone() -> None:
    found = band([5.0, 4.0])
    assert found.level == math.inf
    assert found.is_well()
    assert not found.is_inside(3.0, found.level, found.spread), "five are needed"
    found.observe(math.inf, accept=True)
    assert not found.is_well()


def test_what_is_forgotten_is_not_judged() -> None:
    found = band([2.0] * 20)
    found.forget_recent()
    assert not found.is_inside(3.0, found.level, found.spread)


def test_its_state_goes_on() -> None:
    found, twin = band([float(i) for i in range(20)]), LossBand()
    twin.load_state_dict(found.state_dict())
    assert twin.state_dict() == found.state_dict()
    assert (twin.level, twin.spread) == (found.level, found.spread)
