"""A host that is refused by itself, before ranks are connected: the others do not wait for it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from launch import run_scenarios

REFUSED = re.escape("2 lit-stable fit: --data.micro_bach: is no option; nearest is --data.micro_batch.\n")
TOLD = r"2 lit-stable fit: rank {} on \S+: --data.micro_bach: is no option; nearest is --data.micro_batch.\n"
SAID = {
    "the_first_is_refused": (REFUSED, TOLD.format(0)),
    "the_second_is_refused": (TOLD.format(1), REFUSED),
    "both_are_refused": (REFUSED, REFUSED),
    "all_are_there": ("0 .*", "0 .*"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, script = tmp_path_factory.mktemp("ranks"), "rank_scenarios_roll_call.py"
    return run_scenarios(list(SAID), folder, script=script, hosts=2, timeout=100)


@pytest.mark.parametrize("name", SAID)
def test_each_host_says_what_it_was_refused_for_and_the_others_say_whose(results: dict[str, Any], name: str) -> None:
    found = results[name]
    assert "error" not in found, found["error"]
    for expected, said in zip(SAID[name], found["said"], strict=True):
        assert re.fullmatch(expected, said, re.DOTALL), said
    assert found["seconds"] < 30, "neither waits for a timeout"
