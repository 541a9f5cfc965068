from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from lit_stable.callbacks.interval_clock import IntervalClock


@pytest.fixture
def wait(monkeypatch) -> Callable[[float], None]:
    """Let time pass for the clock."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.seconds)

    def wait(seconds: float) -> None:
        now.seconds += seconds

    return wait


def test_tokens_per_second_are_those_of_the_interval(wait: Callable[[float], None]) -> None:
    clock = IntervalClock()
    clock.start(1000)
    wait(10)
    assert clock.interval(1500) == 50.0
    wait(1)
    assert clock.interval(2000) == 500.0


def test_a_pause_does_not_count(wait: Callable[[float], None]) -> None:
    clock = IntervalClock()
    clock.start(0)
    wait(1)
    clock.pause()
    wait(60)
    clock.go_on()
    wait(1)
    assert clock.interval(100) == 50.0


def test_the_overall_rate_leaves_out_the_first_interval(wait: Callable[[float], None]) -> None:
    clock = IntervalClock()
    clock.start(0)
    wait(30)  # compiles
    clock.interval(10)
    wait(1)
    clock.interval(110)
    wait(3)
    assert clock.overall(210) == 200 / 4


def test_with_one_interval_the_overall_rate_is_its_rate(wait: Callable[[float], None]) -> None:
    clock = IntervalClock()
    clock.start(500)
    wait(2)
    clock.interval(600)
    wait(1)  # saving
    assert clock.overall(600) == 50.0


def test_the_time_after_the_last_line_does_not_lower_the_overall_rate(wait: Callable[[float], None]) -> None:
    clock = IntervalClock()
    clock.start(0)
    for tokens in (10, 20):
        wait(1)
        clock.interval(tokens)
    wait(9)
    assert clock.overall(20) == 10.0


def test_a_clock_started_again_begins_anew(wait: Callable[[float], None]) -> None:
    clock = IntervalClock()
    for _ in range(2):
        clock.start(0)
        wait(1)
        clock.interval(10)
        wait(1)
        assert clock.overall(40) == 30.0
