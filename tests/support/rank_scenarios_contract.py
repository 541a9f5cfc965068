"""The contract on two ranks: one scenario for each strategy and callback. Run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import rank_scenarios
from contract_entries import ENTRIES
from contract_fits import QuickRuns, Runs, gathered
from contract_project import Host
from contract_promises import broken
from rank_scenarios import SCENARIOS, main


def scenario_names(*strategies: str) -> list[str]:
    """One name for each strategy and each callback that runs under it."""
    return [f"{s}-{name}" for s in strategies for name, entry in ENTRIES.items() if s in entry.strategies]


def contract(strategy: str, name: str) -> dict[str, Any]:
    """By promise what is wrong with it on each rank."""
    folder = Path(os.environ["SCENARIO_FOLDER"]) / f"{strategy}-{name}"  # every rank knows it, before there is a group
    if rank_scenarios.ACCELERATOR == "cpu":
        runs: QuickRuns = Runs(name, Host(strategy, ranks=2), folder)
    else:
        runs = QuickRuns(name, Host(strategy, ranks=2, accelerator="gpu", precision="bf16-mixed"), folder)
    by_rank = gathered(broken(runs))
    return {promise: [wrong[promise] for wrong in by_rank] for promise in by_rank[0]}


for scenario in scenario_names("ddp", "fsdp", "fsdp2"):
    SCENARIOS[scenario] = functools.partial(contract, *scenario.split("-"))


if __name__ == "__main__":
    main()
