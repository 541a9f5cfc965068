"""A host that is refused by itself, before ranks are connected: the others do not wait for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import run_scenarios

REFUSED = "2 lit-stable fit: --data.micro_bach: is no option; nearest is --data.micro_batch.\n"
TOLD = r"2 lit-stable fit: rank {} on \S+: --data.micro_bach: is no option; nearest is --data.micro_batch.\n"


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("all_are_there", "0 .*", "0 .*"),
        ("the_second_is_refused", TOLD.format(1), re.escape(REFUSED)),
        ("the_first_is_refused", re.escape(REFUSED), TOLD.format(0)),
        ("both_are_refused", re.escape(REFUSED), re.escape(REFUSED)),
    ],
)
def test_each_host_says_what_it_was_refused_for_and_the_others_say_whose(
    tmp_path: Path, name: str, first: str, second: str
) -> None:
    found = run_scenarios([name], tmp_path, script="rank_scenarios_roll_call.py", hosts=2, timeout=50)[name]
    assert "error" not in found, found["error"]
    assert re.fullmatch(first, found["said"][0], re.DOTALL), found
    assert re.fullmatch(second, found["said"][1], re.DOTALL), found
    assert found["seconds"] < 30, "neither waits for a timeout"
