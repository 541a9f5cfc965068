"""A sharded checkpoint of four ranks goes on with two, and again with four, 8-bit states included."""

from __future__ import annotations

import pytest
import torch
from world_legs import run_legs


def test_four_two_four_ranks_are_one_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    legs = run_legs(tmp_path_factory.mktemp("world"))
    rows = [row for name in ("first", "second", "third") for row in legs[name]["rows"]]
    assert [step for step, *_ in rows] == [1, 2, 3, 4, 5, 6]
    # Two ranks add up in another order than four; a sample out of order would move a loss by tenths.
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(legs["whole"]["rows"]), rtol=1e-4, atol=1e-5)
    for before, after in (("first", "second"), ("second", "third")):
        assert legs[before]["end"] == legs[after]["start"], "codes and maxima are those that were saved, to the bit"
