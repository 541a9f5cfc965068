"""The contract on two ranks: one scenario for each strategy and group of callbacks. Run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import functools
import os
import traceback
from pathlib import Path

import rank_scenarios
from contract_entries import groups
from contract_fits import QuickRuns, Runs, gathered
from contract_project import Host
from contract_promises import broken
from rank_scenarios import SCENARIOS, main


def scenario_names(*strategies: str) -> list[str]:
    """One name for each strategy and each group of callbacks."""
    return [f"{strategy}-{group}" for strategy in strategies for group in groups(strategy)]


def contract(strategy: str, group: str) -> dict[str, list[str]]:
    """By promise what is wrong with it on each rank; nothing for one that is kept."""
    by_rank = gathered(_broken(strategy, group))
    promises = sorted({promise for wrong in by_rank for promise in wrong})
    return {promise: [wrong.get(promise, "") for wrong in by_rank] for promise in promises}


def _broken(strategy: str, group: str) -> dict[str, str]:
    folder = Path(os.environ["SCENARIO_FOLDER"]) / f"{strategy}-{group}"  # every rank knows it, before there is a group
    names = groups(strategy)[group]
    try:
        if rank_scenarios.ACCELERATOR == "cpu":
            return broken(Runs(names, Host(strategy, ranks=2), folder))
        return broken(QuickRuns(names, Host(strategy, ranks=2, accelerator="gpu", precision="bf16-mixed"), folder))
    except Exception:  # alike on all ranks, as a refusal is: the callbacks after this one still have their turn
        return {"it fits": traceback.format_exc()}


for scenario in scenario_names("ddp", "fsdp", "fsdp2"):
    SCENARIOS[scenario] = functools.partial(contract, *scenario.split("-"))


if __name__ == "__main__":
    main()
