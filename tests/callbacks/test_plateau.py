from __future__ import annotations

import math

import pytest

from lit_stable.callbacks.events import Event
from lit_stable.callbacks.plateau import Plateau


def evaluations(detector: Plateau, validation: list[float], training: list[float]) -> list[Event]:
    """One evaluation every 100 steps, after the training losses of those steps."""
    found: list[Event] = []
    for number, (val, train) in enumerate(zip(validation, training, strict=True), 1):
        found += detector.observe(100 * number - 50, {"loss": train})
        found += detector.observe(100 * number, {"loss": train, "val_loss": val})
    return found


def test_a_flat_curve_fires_once_and_tells_that_training_still_falls() -> None:
    validation = [3.0, 2.5, 2.2, *[2.2] * 30]
    training = [3.0, 2.4, 2.1, *[2.1 - 0.02 * n for n in range(30)]]
    (event,) = evaluations(Plateau(patience=1000), validation, training)
    assert (event.step, event.kind, event.evidence["best_step"]) == (1300, "plateau", 300.0)
    assert event.evidence["gap_at_best"] == pytest.approx(0.1)
    assert event.evidence["gap"] == pytest.approx(2.2 - (2.1 - 0.02 * 9))


def test_a_gain_ends_a_plateau_and_the_next_is_told_again() -> None:
    validation = [2.2] * 15 + [2.0] * 15
    assert [e.step for e in evaluations(Plateau(patience=1000), validation, [2.0] * 30)] == [1100, 2600]


def test_gains_below_the_smallest_that_counts_are_none() -> None:
    validation = [2.2 - 0.0001 * n for n in range(20)]
    assert len(evaluations(Plateau(patience=1000), validation, [2.0] * 20)) == 1
    assert evaluations(Plateau(patience=1000, min_improvement=0.0), validation, [2.0] * 20) == []


def test_values_that_are_not_finite_are_no_evaluation() -> None:
    assert evaluations(Plateau(patience=1000), [2.2] + [math.nan] * 30, [math.nan] * 31) == []
