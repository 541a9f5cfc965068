from __future__ import annotations

import math

import pytest
from series import noisy, show, trace

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.spike_alarm import SpikeAlarm


def with_values(at: dict[int, float], steps: int = 600) -> list[float]:
    return [at.get(step, value) for step, value in enumerate(noisy(steps), 1)]


def steps(values: list[float], **options: float) -> list[tuple[int, str]]:
    return [(event.step, event.kind) for event in show(SpikeAlarm(**options), values)]  # type: ignore[arg-type]


def test_one_value_far_outside_is_found_at_once_and_once() -> None:
    event = show(SpikeAlarm(), with_values({300: 9.0}))
    assert [(e.step, e.kind, e.evidence["value"]) for e in event] == [(300, "spike", 9.0)]
    assert 3.5 < event[0].evidence["limit"] < 4.2  # 16 deviations of 0.05 above 3


def test_a_lone_value_a_little_outside_is_left_alone_and_the_second_is_not() -> None:
    assert steps(with_values({300: 4.5})) == []
    assert steps(with_values({300: 4.5, 302: 4.5})) == [(302, "spike")]


def test_the_second_of_two_spikes_is_judged_like_the_first() -> None:
    assert steps(with_values({300: 9.0, 310: 9.0})) == [(300, "spike"), (310, "spike")]


def test_nan_is_found_at_once_and_does_not_disturb_what_follows() -> None:
    assert steps(with_values({3: math.nan})) == [(3, "not_finite")]
    assert steps(with_values({300: math.nan, 310: 9.0, 320: math.inf})) == [
        *((300, "not_finite"), (310, "spike"), (320, "not_finite")),
    ]


def test_a_shift_of_level_is_one_event_and_then_the_normal() -> None:
    values = [v + (3.0 if step >= 300 else 0.0) for step, v in enumerate(with_values({500: 14.0}), 1)]
    assert steps(values) == [(301, "spike"), (500, "spike")]


def test_a_run_that_stays_not_finite_is_one_event() -> None:
    assert steps([*noisy(300), *[math.nan] * 500]) == [(301, "not_finite")]


def test_each_signal_is_judged_by_itself() -> None:
    detector, found = SpikeAlarm(), []
    for step, value in enumerate(noisy(400), 1):
        norm = 60.0 if step == 350 else value
        found += detector.observe(step, {"loss": value, "grad_norm": norm})
    assert [(e.step, e.evidence["signal"]) for e in found] == [(350, "grad_norm")]


def test_the_recorded_spike_is_one_event() -> None:
    assert steps(trace("llama60m_lr4e-3_dies")) == [(605, "spike")]


@pytest.mark.parametrize(
    "options", [{"z_score": 0.0}, {"window": 7}, {"warmup": 1}, {"warmup": 200}, {"min_spread": -1.0}, {"adapt": 0}]
)
def test_refuses_what_is_out_of_range(options: dict[str, float]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(MisconfigurationException, match=rf"`SpikeAlarm\({name}={value}\)`: must be"):
        SpikeAlarm(**options)  # type: ignore[arg-type]
