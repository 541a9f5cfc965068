from __future__ import annotations

import math
from typing import Any

import pytest

from lit_stable.callbacks import Recovery
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.recovery_rungs import DEFAULT_RUNGS, DEFAULT_TRIGGERS, check, place_of


def test_the_standard_ladder_is_whole() -> None:
    rungs = check(DEFAULT_RUNGS, DEFAULT_TRIGGERS)
    assert [rung.do for rung in rungs] == ["wait", "lr", "rewind", "stop"]
    assert [rung.limit for rung in rungs] == [math.inf, 5, 3, 10]


def test_triggers_name_a_rung_by_what_it_does_or_by_its_place() -> None:
    rungs = check([{"do": "lr", "factor": 0.9}, {"do": "lr", "factor": 0.5}, {"do": "stop"}], {})
    assert [place_of(where, rungs) for where in ("lr", "stop", 2, "2", 4, "wait")] == [0, 2, 1, 1, None, None]


def test_without_triggers_they_follow_the_rungs_that_are_there() -> None:
    recovery = Recovery([{"do": "lr", "factor": 0.9}, {"do": "stop"}])
    assert recovery.triggers["spike"] == "lr"
    assert recovery.triggers["not_finite"] == "stop"


@pytest.mark.parametrize(
    ("rung", "said"),
    [
        ({"do": "leap"}, r"rung 1: do='leap': must be one of wait, skip, lr, rewind, stop"),
        ({}, r"do=None: must be one of"),
        ({"do": "wait", "patience": 3}, r"patience: is no option; the options of a wait are max_times, steps, within"),
        ({"do": "wait", "factor": 0.5}, r"factor=0.5: means nothing on a wait"),
        ({"do": "wait", "steps": 4}, r"steps=4: must be at least 5"),
        ({"do": "wait", "within": -1.0}, r"within=-1.0: must be 0 or more"),
        ({"do": "wait", "max_times": 0}, r"max_times=0: must be at least 1"),
        ({"do": "skip", "skip_steps": 0}, r"skip_steps=0: must be at least 1"),
        ({"do": "lr"}, r"factor=1.0: cuts nothing"),
        ({"do": "lr", "factor": 0.0}, r"factor=0.0: must be above 0 and at most 1"),
        ({"do": "lr", "factor": 0.9, "cooldown": -1}, r"cooldown=-1: must be 0 or more"),
        ({"do": "lr", "factor": 0.9, "floor": 2.0}, r"floor=2.0: must be from 0 to 1"),
        ({"do": "rewind", "max_times": None}, r"max_times=null: a run that rewinds without limit may never end"),
        ({"do": "rewind", "to": -1}, r"to=-1: must be 0 or more"),
        ({"do": "rewind", "before": -1}, r"before=-1"),
        ({"do": "rewind", "after": -1}, r"after=-1"),
        ({"do": "rewind", "weight_decay": -0.1}, r"weight_decay=-0.1: must be 0 or more"),
        ({"do": "rewind", "dropout": 1.0}, r"dropout=1.0: must be at least 0 and below 1"),
        ({"do": "rewind", "clip": 0.0}, r"clip=0.0: must be above 0"),
        ({"do": "stop", "steps": 5}, r"steps=5: means nothing on a stop; its options are none"),
    ],
)
def test_what_is_wrong_is_said(rung: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        check([rung], {})


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(MisconfigurationException) as found:
        check([{"do": "stop"}, {"do": "wait", "steps": 1}, {"do": "lr"}], {})
    lines = str(found.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("`Recovery`: ") for line in lines)
    with pytest.raises(MisconfigurationException, match=r"triggers spike='rewind': names no rung; give one of wait"):
        check([{"do": "wait"}], {"spike": "rewind"})
    with pytest.raises(MisconfigurationException, match=r"rungs=\[\]"):
        check([], {})
