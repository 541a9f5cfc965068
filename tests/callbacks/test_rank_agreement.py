"""What is said where ranks differ; that they do is tried in ``tests/distributed/test_agreement_of_ranks.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lit_stable.callbacks import rank_agreement
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.rank_agreement import on_every_rank, refuse_ranks_that_differ


def refused(monkeypatch: pytest.MonkeyPatch, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """The sentence of two ranks; empty where nothing is refused."""

    def two(told: tuple[str, str, dict[str, str]]) -> list[Any]:
        return [("rank 0 on a", *told[1:]), ("rank 1 on b", told[1], {name: repr(v) for name, v in second.items()})]

    monkeypatch.setattr(rank_agreement, "gather_objects", two)
    try:
        refuse_ranks_that_differ("its recipe", first)
    except MisconfigurationException as error:
        return str(error)
    return ""


def test_one_rank_agrees_with_itself() -> None:
    refuse_ranks_that_differ("its recipe", {"a": float("nan"), "b": None})


def test_a_number_that_is_none_is_the_same_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, {"a": float("nan")}, {"a": float("nan")}) == ""


def test_three_are_named_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dict.fromkeys("abcde", 1)
    assert refused(monkeypatch, first, {**dict.fromkeys("abcd", 2), "f": None}) == (
        "rank 1 on b, unlike rank 0 on a: a is 2 and 1 on rank 0; b is 2 and 1 on rank 0; c is 2 and 1 on rank 0;"
        " 3 more; all ranks train one model by one recipe: start them all with the same command, files and versions."
    )


def test_what_one_lacks_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a is unset and 'x' on rank 0" in refused(monkeypatch, {"a": "x"}, {})


def test_of_long_values_the_place_is_shown_in_which_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(monkeypatch, {"a": list(range(1000))}, {"a": [*range(900), -7, *range(901, 1000)]})
    assert "899, -7, 901" in said
    assert "899, 900, 901" in said
    assert len(said) < 500


def test_what_one_rank_fails_at_is_raised_by_all_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rank_agreement, "gather_objects", lambda told: [("rank 0 on a", *told[1:]), ("rank 1 on b", told[1], "x: gone")]
    )
    with pytest.raises(ValueError, match=r"^rank 1 on b: x: gone$"):
        on_every_rank("its data", lambda: 1)


@pytest.mark.parametrize("error", [ValueError("x"), OSError(), KeyError("y")])
def test_who_fails_raises_what_it_failed_with(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        on_every_rank("its data", fail)
    assert raised.value is error
