from __future__ import annotations

from lit_stable.callbacks.events import Event
from lit_stable.callbacks.loss_scale_collapse import LossScaleCollapse


def watch(scales: list[float], every: int = 1, **options: float) -> list[Event]:
    detector = LossScaleCollapse(**options)  # type: ignore[arg-type]
    return [e for n, scale in enumerate(scales, 1) for e in detector.observe(n * every, {"loss_scale": scale})]


def test_a_scale_that_is_halved_now_and_then_is_healthy() -> None:
    assert watch([2.0 ** (15 + (step // 200) % 2) for step in range(10_000)]) == []


def test_halvings_in_a_row_are_one_event() -> None:
    (event,) = watch([*[65536.0] * 50, *[65536.0 / 2**n for n in range(1, 11)], *[64.0] * 50])
    assert (event.step, event.evidence["halvings"]) == (56, 6.0)


def test_a_fall_between_two_logged_values_counts_as_so_many_halvings() -> None:
    assert [e.step for e in watch([65536.0, 65536.0, 512.0], every=10)] == [30]


def test_below_the_floor_is_an_event_of_its_own() -> None:
    found = watch([4.0, 4.0, 2.0, 1.0, 0.5, 0.5, 1.0, 0.5], window=2, halvings=2)
    assert [(e.step, e.evidence.get("floor")) for e in found if "floor" in e.evidence] == [(5, 1.0), (8, 1.0)]


def test_a_scale_that_rose_again_is_told_again() -> None:
    fall = [65536.0 / 2**n for n in range(8)]
    assert len(watch([*fall, *reversed(fall), *fall])) == 2


def test_steps_that_overflow_for_ever_at_the_lowest_scale_are_told_once() -> None:
    """The scale stands still at its threshold, above the floor, and no step is taken."""
    detector = LossScaleCollapse(overflows=5)
    overflows = [0.0] * 9 + [1.0] * 4 + [0.0] + [1.0] * 30 + [0.0] + [1.0] * 5
    # The scale is logged at every tenth step alone.
    values = [{"overflow": o, **({} if n % 10 else {"loss_scale": 4.0})} for n, o in enumerate(overflows)]
    found = [e for n, seen in enumerate(values) for e in detector.observe(n, seen)]
    assert [(e.step, e.evidence) for e in found] == [(step, {"loss_scale": 4.0, "overflows": 5.0}) for step in (18, 49)]


def test_a_scale_that_looks_for_its_level_is_healthy() -> None:
    """torch's first scale, 2^16, over gradients that fit at 2^11: five overflows at the start of a run."""
    detector = LossScaleCollapse()
    scales = [2.0 ** max(16 - n, 11) for n in range(3000)]
    assert not [
        e for n, s in enumerate(scales) for e in detector.observe(n, {"overflow": float(n < 5), "loss_scale": s})
    ]
