"""Two ranks of two hosts before they are connected: one scenario for each launch. Run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rank_scenarios import main, rank, scenario, shared_folder
from tiny_recipe import command, write_recipe

TYPO = ["--data.micro_bach", "4"]


def _ended(words: list[str]) -> dict[str, Any]:
    """What ``fit`` came to on each rank; ranks that were never connected tell each other by files."""
    folder = shared_folder()
    own = folder / f"node-{rank()}"
    own.mkdir()
    began = time.monotonic()
    done = command("fit", "--config", write_recipe(own, trainer__strategy="ddp", run__root=str(folder)), *words)
    told = Path(os.environ["SCENARIO_FOLDER"]) / f"told-{rank()}"
    told.write_text(f"{done.code} {done.err}")
    while not (other := told.with_name(f"told-{1 - rank()}")).exists() or not other.read_text():
        time.sleep(0.05)
    texts = [told.with_name(f"told-{number}").read_text() for number in range(2)]
    return {"said": texts, "seconds": time.monotonic() - began}


@scenario
def all_are_there() -> dict[str, Any]:
    return _ended([])


@scenario
def the_second_is_refused() -> dict[str, Any]:
    return _ended(TYPO if rank() else [])


@scenario
def the_first_is_refused() -> dict[str, Any]:
    return _ended([] if rank() else TYPO)


@scenario
def both_are_refused() -> dict[str, Any]:
    return _ended(TYPO)


if __name__ == "__main__":
    main()
