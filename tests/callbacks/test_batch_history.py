from __future__ import annotations

from lit_stable.callbacks.batch_history import BatchHistory, planned_samples
from lit_stable.callbacks.batch_schedule import build_schedule


def history(batches: list[int], first: int = 1, before: int = 0) -> BatchHistory:
    found = BatchHistory()
    for step, batch in enumerate(batches, first):
        found.note(step, before, batch)
        before += batch
    return found


def test_samples_before_any_step_past_or_to_come() -> None:
    found = history([4, 4, 8, 8])
    assert [found.samples_before(step) for step in range(1, 8)] == [0, 4, 8, 16, 24, 32, 40]
    assert found.state_dict() == [[1, 0, 4], [3, 8, 8]]


def test_a_step_that_is_taken_again_replaces_what_was_known_of_it() -> None:
    found = history([4, 4, 8, 8])
    found.note(3, 8, 4)
    assert [found.samples_before(step) for step in (3, 4, 5)] == [8, 12, 16]


def test_before_the_first_step_known_nothing_is_guessed() -> None:
    found = history([4, 4], first=11, before=100)
    assert [found.samples_before(step) for step in (1, 11, 12)] == [100, 100, 104]


def test_a_window_is_whole_global_batches_of_the_stream() -> None:
    found = history([4] * 10)
    assert found.window(3, 5, taken=10, dropped=[]) == (8, 20)
    assert found.window(9, 12, taken=10, dropped=[]) == (32, 48), "the last two are still to come"


def test_a_window_lies_behind_what_is_dropped_already() -> None:
    found = history([4] * 10)
    assert found.window(3, 5, taken=10, dropped=[(8, 12)]) == (12, 24)
    assert found.window(2, 5, taken=10, dropped=[(8, 12)]) == (4, 24), "older gaps within are covered again"


def test_steps_to_come_follow_a_ramp() -> None:
    class Ramp:
        samples_before = staticmethod(build_schedule("4 for 10 steps then 8", full=8).samples_before)

    planned = planned_samples([object(), Ramp()])
    assert history([4] * 10).window(9, 12, taken=10, dropped=[], planned=planned) == (32, 56)
    assert planned_samples([object()]) is None


def test_its_state_goes_on() -> None:
    found, twin = history([4, 8]), BatchHistory()
    twin.load_state_dict(found.state_dict())
    assert twin.samples_before(9) == found.samples_before(9)
    assert BatchHistory().samples_before(5) == 0
