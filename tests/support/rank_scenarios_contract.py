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

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def scenario_names(*strategies: str, precision: str = "32-true") -> list[str]:
    """One name for each strategy and each group of callbacks."""
    return [f"{strategy}/{precision}/{group}" for strategy in strategies for group in groups(strategy)]


def contract(strategy: str, precision: str, group: str) -> dict[str, list[str]]:
    """By promise what is wrong with it on each rank; nothing for one that is kept."""
    by_rank = gathered(_broken(strategy, precision, group))
    promises = sorted({promise for wrong in by_rank for promise in wrong})
    return {promise: [wrong.get(promise, "") for wrong in by_rank] for promise in promises}


def _broken(strategy: str, precision: str, group: str) -> dict[str, str]:
    # Every rank knows it, before there is a group.
    folder = Path(os.environ["SCENARIO_FOLDER"]) / f"{strategy}-{precision}-{group}"
    fits = Runs if rank_scenarios.ACCELERATOR == "cpu" else QuickRuns
    host = Host(strategy, 2, rank_scenarios.ACCELERATOR, precision)
    try:
        return broken(fits(groups(strategy)[group], host, folder))
    except Exception:  # alike on all ranks, as a refusal is: the callbacks after this one still have their turn
        return {"it fits": traceback.format_exc()}


for precision in PRECISIONS:
    for scenario in scenario_names("ddp", "fsdp", "fsdp2", precision=precision):
        SCENARIOS[scenario] = functools.partial(contract, *scenario.split("/"))


if __name__ == "__main__":
    main()
