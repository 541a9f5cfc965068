from __future__ import annotations

import pytest

from lit_stable.data.reshuffle import Settled, as_reshuffles, parse_marks, settle, with_rewinds

BATCH = 10


def before(step: int) -> int:
    return (step - 1) * BATCH


def test_steps_and_samples_become_positions_behind_what_is_dropped():
    settled = settle({"30 steps": 8, "120 samples": 7}, [], before, 0, [(100, 150)])
    assert settled == [Settled("120 samples", 7, 170), Settled("30 steps", 8, 350)]
    assert as_reshuffles(settled) == [(170, 7), (350, 8)]


def test_what_was_passed_is_a_fact_whatever_the_recipe_says():
    known = [Settled("5 steps", 7, 50), Settled("9 steps", 9, 90)]
    # The batch is twice as large now: the passed point stays, the one ahead follows the recipe.
    assert settle({"5 steps": 7, "9 steps": 9}, known, lambda step: before(step) * 2, 60, []) == [
        Settled("5 steps", 7, 50),
        Settled("9 steps", 9, 180),
    ]
    assert settle({}, known, before, 60, []) == [Settled("5 steps", 7, 50)]


def test_the_point_at_which_a_run_stands_lies_ahead():
    assert settle({"5 steps": 7}, [], before, 50, []) == [Settled("5 steps", 7, 50)]
    assert settle({"5 steps": 8}, [Settled("5 steps", 7, 50)], before, 50, []) == [Settled("5 steps", 8, 50)]


def test_rewinds_stand_among_those_of_the_recipe_each_once_however_often_they_are_added():
    rewinds = [(70, 3), (20, 4)]
    once = with_rewinds([Settled("5 steps", 7, 50)], rewinds)
    assert as_reshuffles(once) == [(20, 4), (50, 7), (70, 3)]
    assert with_rewinds(once, rewinds) == once


@pytest.mark.parametrize("known", [[], [Settled("5 steps", 8, 50)]])
def test_a_point_behind_the_run_is_refused_unless_it_was_known_there(known):
    with pytest.raises(ValueError, match=r"data\.order\.reshuffle=\{5 steps: 7\}: is behind the run"):
        settle({"5 steps": 7, "9 steps": 7}, known, before, 60, [])


DROPPED = [(44, 56)]


def test_a_new_order_that_would_bring_dropped_data_back_is_refused_with_the_first_point_that_does_not():
    """Drops are positions: in another order other samples stand there, and those that were dropped come elsewhere."""
    sentence = r"reshuffle=\{4 steps: 7\}: lies before stream positions 44 to 55, .*, 44 samples or later\."
    with pytest.raises(ValueError, match=sentence):
        settle({"4 steps": 7}, [], before, 40, DROPPED, dropped_before=DROPPED)
    assert settle({"44 samples": 7}, [], before, 40, DROPPED, dropped_before=DROPPED) == [Settled("44 samples", 7, 56)]
    assert settle({"5 steps": 7}, [], before, 40, DROPPED, dropped_before=DROPPED) == [Settled("5 steps", 7, 62)]


def test_what_was_dropped_in_the_new_order_is_not_brought_back_by_it():
    known = [Settled("4 steps", 7, 40)]  # a checkpoint knows also of those that lie ahead
    assert settle({"4 steps": 7}, known, before, 30, DROPPED, dropped_before=DROPPED) == known
    assert settle({"4 steps": 7}, [], before, 0, DROPPED) == known  # both are of one recipe, from its beginning


def test_all_that_are_no_requests_are_told():
    assert parse_marks({"1k steps": 1, "2_000 samples": 0}) == {(1000, "steps"): 1, (2000, "samples"): 0}
    with pytest.raises(
        ValueError, match=r"data\.order\.reshuffle=\{5: 1\}: must be a count of steps or samples"
    ) as error:
        parse_marks({"5": 1, "x steps": 2, "5 steps": -1, "6 steps": 1})
    assert [line.split("=")[1].split(": must")[0] for line in str(error.value).splitlines()] == [
        "{5: 1}",
        "{x steps: 2}",
        "{5 steps: -1}",
    ]
