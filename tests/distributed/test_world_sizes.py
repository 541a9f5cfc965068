"""A sharded checkpoint of four ranks goes on with two, and again with four, 8-bit states included, on any hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_scenarios
from world_legs import SCRIPT, run_legs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def legs(folder: Path) -> dict[str, dict[str, Any]]:
    return run_legs(folder)


def test_four_two_four_ranks_are_one_run(legs: dict[str, dict[str, Any]]) -> None:
    rows = [row for name in ("first", "second", "third") for row in legs[name]["rows"]]
    assert [step for step, *_ in rows] == [1, 2, 3, 4, 5, 6]
    # Two ranks add up in another order than four; a sample out of order would move a loss by tenths.
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(legs["whole"]["rows"]), rtol=1e-4, atol=1e-5)
    for before, after in (("first", "second"), ("second", "third")):
        assert legs[before]["end"] == legs[after]["start"], "codes and maxima are those that were saved, to the bit"


def test_two_hosts_of_two_ranks_are_one_of_four_to_the_bit(folder: Path, legs: dict[str, dict[str, Any]]) -> None:
    names = ["whole", "third"]  # from the start, and from a checkpoint of one host
    found = run_scenarios(names, folder, processes=4, script=SCRIPT, hosts=2)
    assert found == {name: legs[name] for name in names}
