from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from lit_stable.callbacks.events import Event
from lit_stable.callbacks.surge import Surge


def watch(curve: Callable[[int], float], every: int, steps: int = 5000) -> list[Event]:
    detector = Surge(["x"])
    return [event for step in range(1, steps, every) for event in detector.observe(step, {"x": curve(step)})]


def grows(step: int) -> float:
    return 1.5 * 1.01 ** max(0, min(step - 800, 1000))  # 1 % a step from step 800 on


@pytest.mark.parametrize("every", [1, 10, 50])
def test_growth_of_one_percent_a_step_is_found_before_it_is_tenfold(every: int) -> None:
    (event,) = watch(grows, every)
    assert 860 <= event.step <= 960
    assert event.evidence["value"] < 15


@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize(
    "curve",
    [
        lambda step: 1 + 2 * math.log(1 + step),
        math.sqrt,
        lambda step: 1 + 0.05 * step,
        lambda step: 1 + 0.3 * math.sin(step / 60),
        lambda step: 5.0,
        lambda step: 0.0,
        lambda step: math.nan,
    ],
    ids=["logarithm", "root", "line", "wave", "constant", "zero", "nan"],
)
def test_growth_that_slows_down_is_healthy(curve: Callable[[int], float], every: int) -> None:
    assert watch(curve, every) == []


def test_noise_neither_hides_it_nor_makes_it() -> None:
    source = random.Random(0)
    assert watch(lambda step: math.sqrt(step) * math.exp(0.1 * source.gauss(0, 1)), 1) == []
    assert len(watch(lambda step: grows(step) * math.exp(0.1 * source.gauss(0, 1)), 1)) == 1


def test_the_next_surge_needs_a_fall_first() -> None:
    twice = watch(lambda step: grows(step) if step < 1500 else 1.5 * 1.01 ** max(0, min(step - 2500, 500)), 1)
    assert len(twice) == 2
    assert 2560 < twice[1].step < 2660


def test_only_named_quantities_are_watched() -> None:
    detector = Surge(["activation/*"])
    found: list[Event] = []
    for step in range(1, 2000):
        found += detector.observe(step, {"activation/fc2": grows(step), "lr": grows(step)})
    assert [e.evidence["signal"] for e in found] == ["activation/fc2"]
