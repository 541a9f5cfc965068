"""A run on four ranks that goes on with two and again with four, beside one that stays on four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch import run_scenarios

SCRIPT = "rank_scenarios_world.py"


def run_legs(folder: Path, accelerator: str = "cpu") -> dict[str, dict[str, Any]]:
    """What each leg came to, by name; each goes on with the checkpoint of the one before it."""
    found: dict[str, dict[str, Any]] = {}
    for ranks, names in ((4, ["whole", "first"]), (2, ["second"]), (4, ["third"])):
        found.update(run_scenarios(names, folder, accelerator, ranks, SCRIPT))
    for result in found.values():
        assert "error" not in result, result["error"]
    return found
