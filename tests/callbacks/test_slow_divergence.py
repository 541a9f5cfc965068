from __future__ import annotations

import math

from series import noisy, show, trace

from lit_stable.callbacks.slow_divergence import SlowDivergence


def test_the_recorded_run_diverges_after_its_spike_and_not_at_it() -> None:
    (event,) = show(SlowDivergence(), trace("llama60m_lr4e-3_dies"))
    assert event.step == 1833
    assert event.evidence["best_step"] == 1217.0
    assert 4.8 < event.evidence["best"] < 4.95


def test_a_slow_drift_is_found_while_it_is_small() -> None:
    values = [v + 0.001 * max(0, step - 400) for step, v in enumerate(noisy(1500), 1)]
    (event,) = show(SlowDivergence(), values)
    assert 600 < event.step < 850
    assert event.evidence["median_loss"] < 3.45
    assert event.evidence["best_step"] < 450


def test_a_run_on_its_way_back_from_a_spike_is_left_alone() -> None:
    back = [v + (4.0 * math.exp(-(step - 400) / 300) if step >= 400 else 0.0) for step, v in enumerate(noisy(3000), 1)]
    assert show(SlowDivergence(), back) == []


def test_two_divergences_are_two_events() -> None:
    def level(step: int) -> float:
        return 0.4 * min(1.0, max(0.0, step - 400) / 400) if step < 1200 else 0.3 * max(0.0, step - 1800) / 600

    values = [v + level(step) for step, v in enumerate(noisy(3000), 1)]
    assert len(show(SlowDivergence(), values)) == 2


def test_values_that_are_not_finite_are_passed_over() -> None:
    values = [math.nan if step % 7 == 0 else v for step, v in enumerate(noisy(2000), 1)]
    assert show(SlowDivergence(), values) == []
