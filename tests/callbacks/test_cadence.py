from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import pytest

from lit_stable.callbacks.batch_schedule import build_schedule
from lit_stable.callbacks.cadence import Cadence, parse_cadence
from lit_stable.callbacks.progress import Mark


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (500, (500, "steps")),
        ("500", (500, "steps")),
        ("1.5k steps", (1500, "steps")),
        (" 2M  tokens ", (2_000_000, "tokens")),
        ("2 M tokens", (2_000_000, "tokens")),
        ("100_000 samples", (100_000, "samples")),
    ],
)
def test_a_number_is_of_steps_and_text_may_name_its_unit(every: int | str, expected: tuple[int, str]) -> None:
    assert parse_cadence(every) == expected


@pytest.mark.parametrize(
    ("every", "message"),
    [
        (0, "at least 1"),
        (-3, "at least 1"),
        ("0 tokens", "at least 1"),
        ("-2 tokens", "at least 1"),
        ("2M words", "a count of steps, samples or tokens, as 500 or 2M tokens"),
        ("tokens", "a count of"),
        ("1.5", "a count of"),
        ("", "a count of"),
    ],
)
def test_anything_else_is_refused(every: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_cadence(every)


def test_over_a_ramp_it_is_due_once_for_each_multiple_and_at_the_window_that_comes_to_it() -> None:
    ramp = build_schedule("16 16 6_000_000", 2048)
    marks = [Mark(k, ramp.samples_before(k + 1), 10 * ramp.samples_before(k + 1)) for k in range(20_000)]
    for cadence in (Cadence(500), Cadence(100_000, "samples"), Cadence(2_000_000, "tokens")):
        counts = [getattr(mark, cadence.unit) for mark in marks]
        due = [after for before, after in pairwise(marks) if cadence.is_due(before, after)]
        multiples = range(cadence.number, counts[-1] + 1, cadence.number)
        assert [mark.steps for mark in due] == [bisect_left(counts, multiple) for multiple in multiples]


def test_a_window_larger_than_the_cadence_is_due_once() -> None:
    assert Cadence(10, "samples").is_due(Mark(0, 0, 0), Mark(1, 35, 35))
    assert Cadence(10, "samples").is_due(Mark(1, 35, 35), Mark(2, 40, 40))
    assert not Cadence(10, "samples").is_due(Mark(1, 31, 31), Mark(2, 39, 39))
