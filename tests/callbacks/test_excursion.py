from __future__ import annotations

from lit_stable.callbacks.excursion import Excursion


def told(steps: str, adapt: int = 50) -> list[int]:
    """At which steps something is told; ``.`` inside, ``o`` outside, ``F`` far outside."""
    excursion = Excursion(adapt)
    return [n for n, step in enumerate(steps) if excursion.begins(step != ".", far=step == "F")]


def test_far_is_told_at_once_and_near_at_the_second_within_three() -> None:
    assert told("..F...") == [2]
    assert told("..o...") == []
    assert told("..o.o.") == [4]
    assert told("..o..o") == []


def test_one_excursion_is_told_once_and_ends_after_five_steps_inside() -> None:
    assert told("FF....FF") == [0]
    assert told("F.....F") == [0, 6]


def test_after_so_many_steps_outside_they_are_the_normal() -> None:
    excursion, seen = Excursion(adapt=3), []
    for step in "oo.ooo.":
        excursion.begins(step == "o", far=False)
        seen.append(excursion.is_new_normal)
    assert seen == [False, False, False, False, False, True, False]
