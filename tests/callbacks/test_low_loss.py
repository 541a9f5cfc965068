from __future__ import annotations

from series import noisy, show

from lit_stable.callbacks.low_loss import LowLoss


def steps(at: dict[int, float], **options: float) -> list[int]:
    values = [at.get(step, value) for step, value in enumerate(noisy(600), 1)]
    return [event.step for event in show(LowLoss(**options), values)]  # type: ignore[arg-type]


def test_a_batch_of_repeated_text_is_found_at_once_and_once() -> None:
    assert steps({300: 0.4, 301: 0.5, 303: 0.4}) == [300]


def test_a_lone_value_a_little_too_low_is_left_alone_and_the_second_is_not() -> None:
    assert steps({300: 2.0}) == []
    assert steps({300: 2.0, 302: 2.0}) == [302]


def test_what_is_above_the_smallest_drop_is_left_alone_however_quiet_the_loss_was() -> None:
    assert steps({300: 2.8, 301: 2.8, 302: 2.8}, z_score=1.0) == []
    assert steps({300: 2.6, 301: 2.6, 302: 2.6}, z_score=1.0) == [301]


def test_a_lasting_fall_is_one_event_and_then_the_normal() -> None:
    values = [v * (0.4 if step >= 300 else 1.0) for step, v in enumerate(noisy(900), 1)]
    assert [event.step for event in show(LowLoss(), values)] == [300]


def test_a_median_below_the_floor_is_one_event() -> None:
    falling = [3.0 - 0.003 * step for step in range(900)]
    (event,) = show(LowLoss(floor=1.5), falling)
    assert event.evidence["limit"] == 1.5
    assert 1.45 < event.evidence["loss"] < 1.5
