"""Two ranks of two hosts before they are connected; run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from rank_scenarios import main, rank, scenario, shared_folder
from tiny_recipe import command, write_recipe

TYPO = ["--data.micro_bach", "4"]
_starts = itertools.count()


def _ended(words: list[str]) -> dict[str, Any]:
    """What ``fit`` came to on each rank; ranks that were never connected tell each other by files.

    The first time rank 0 keeps the store; then it is as if an agent of torchrun did, which starts them again and again.
    """
    if start := next(_starts):
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(start))
    folder = shared_folder()
    own = folder / f"node-{rank()}"
    own.mkdir()
    began = time.monotonic()
    done = command("fit", "--config", write_recipe(own, trainer__strategy="ddp", run__root=str(folder)), *words)
    told = folder / f"told-{rank()}"
    told.write_text(f"{done.code} {done.err}")
    while not (other := told.with_name(f"told-{1 - rank()}")).exists() or not other.read_text():
        time.sleep(0.05)
    texts = [told.with_name(f"told-{number}").read_text() for number in range(2)]
    return {"said": texts, "seconds": time.monotonic() - began}


@scenario
def the_second_is_refused() -> dict[str, Any]:
    return _ended(TYPO if rank() else [])


@scenario
def the_first_is_refused() -> dict[str, Any]:
    return _ended([] if rank() else TYPO)


@scenario
def both_are_refused() -> dict[str, Any]:
    return _ended(TYPO)


@scenario
def all_are_there() -> dict[str, Any]:
    """The last, since it connects them."""
    return _ended([])


if __name__ == "__main__":
    main()
