"""The contract of every callback with two gloo processes, under DDP and FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
from contract_entries import companies
from launch import of, run_scenarios
from rank_scenarios_contract import scenario_names

#: With a loss scale those that read it alone; all of them on GPUs.
NAMES = [
    *scenario_names("ddp", "fsdp2", of=companies),
    *(f"fsdp2/16-mixed/{name}" for name in ("GradClip", "GradSpikeSkip")),
    *("rare/ddp", "rare/fsdp2"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_scenarios(NAMES, folder, script="rank_scenarios_contract.py", timeout=900)


@of(*NAMES)
def test_it_keeps_every_promise_on_both_ranks(result: dict[str, Any]) -> None:
    assert result == {}
