"""The contract on two ranks: one scenario for each strategy and group of callbacks. Run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import rank_scenarios
from contract_entries import companies, groups
from contract_fits import QuickRuns, RareRuns, Runs, gathered
from contract_project import Host
from contract_promises import broken
from rank_scenarios import SCENARIOS, main

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


Groups = Callable[[str], dict[str, tuple[str, ...]]]


def scenario_names(*strategies: str, precision: str = "32-true", of: Groups = groups) -> list[str]:
    """One name for each strategy and each group of callbacks."""
    return [f"{strategy}/{precision}/{group}" for strategy in strategies for group in of(strategy)]


#: Callbacks of which each can act beside the others; those that watch are with them.
TOGETHER = (
    *("BatchSizeWarmup", "GradClip", "GradSpikeSkip", "LROverride", "LayerNormFreeze", "ScriptedSkip", "UpdateClip"),
    *groups("fsdp2")["watchers"],
)


def contract(strategy: str, precision: str, group: str) -> dict[str, list[str]]:
    """By promise what is wrong with it on each rank; nothing for one that is kept."""
    return _of_both(_broken(strategy, precision, group))


def rare_saves(strategy: str) -> dict[str, list[str]]:
    """Likewise, saved in a validation, at an epoch's end, at an exception and after the fit; of several at once."""
    folder = Path(os.environ["SCENARIO_FOLDER"]) / f"{strategy}-rare"
    host = Host(strategy, 2, rank_scenarios.ACCELERATOR)
    return _of_both(broken(RareRuns(TOGETHER, host, folder)))


def _of_both(wrong_here: dict[str, str]) -> dict[str, list[str]]:
    by_rank = gathered(wrong_here)
    promises = sorted({promise for wrong in by_rank for promise in wrong})
    return {promise: [wrong.get(promise, "") for wrong in by_rank] for promise in promises}


def _broken(strategy: str, precision: str, group: str) -> dict[str, str]:
    # Every rank knows it, before there is a group.
    folder = Path(os.environ["SCENARIO_FOLDER"]) / f"{strategy}-{precision}-{group}"
    # What is idle, logs alone or fits twice is tried on one process, and here where ranks have other pieces of weights.
    fits = Runs if rank_scenarios.ACCELERATOR == "cpu" and strategy != "ddp" else QuickRuns
    host = Host(strategy, 2, rank_scenarios.ACCELERATOR, precision)
    try:
        return broken(fits({**groups(strategy), **companies(strategy)}[group], host, folder))
    except Exception:  # alike on all ranks, as a refusal is: the callbacks after this one still have their turn
        return {"it fits": traceback.format_exc()}


for precision in PRECISIONS:
    for of in (groups, companies):
        for scenario in scenario_names("ddp", "fsdp", "fsdp2", precision=precision, of=of):
            SCENARIOS[scenario] = functools.partial(contract, *scenario.split("/"))
for strategy in ("ddp", "fsdp2"):
    SCENARIOS[f"rare/{strategy}"] = functools.partial(rare_saves, strategy)


if __name__ == "__main__":
    main()
