"""Ranks of several hosts say that they are there, or why they will not be, before they wait for each other.

On one host ``torchrun`` ends all ranks when one ends. Of several hosts one that is refused, for a misspelt key or data
that it lacks, ends alone, and the others wait for it until their timeout: half an hour, and no word of why.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.strategies.launcher import launched_devices, lends_store

_LONGEST = 1800.0  # seconds; torch's own for ranks that do not come
_LAST_WORDS = 20.0  # seconds for others to hear what a rank says that is about to end
_HERE, _ABSENT, _HEARD = "here", "absent", "heard"
_held: list[Any] = []  # the store, which ranks connect by next


def report_here() -> None:
    """Return when every rank is there. To be called by a rank that is ready to be connected; one host does not ask.

    Who is told that another is absent calls `report_absent` too, on its way out: so the others know that it has heard.

    Raises:
        MisconfigurationException: when another rank will not be there, with its host and reason; or is silent for half
            an hour.
    """
    if not _is_needed():
        return
    store, ranks = _store(_LONGEST), int(os.environ["WORLD_SIZE"])
    store.add(_HERE, 1)
    began, pause = time.monotonic(), 0.05
    while (here := store.add(_HERE, 0)) < ranks:
        if store.check([_ABSENT]):
            raise MisconfigurationException(store.get(_ABSENT).decode())
        if time.monotonic() - began > _LONGEST:
            raise MisconfigurationException(
                f"{here} of {ranks} ranks are there after {_LONGEST / 60:.0f} min; see what the other hosts say, and"
                " start all of them again."
            )
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)


def report_absent(problem: str) -> None:
    """Tell the others, in vain if they have gone on, why this rank ends before it is connected."""
    if not _is_needed():
        return
    with suppress(Exception):  # nobody is there to be told
        store, rank = _store(_LAST_WORDS), os.environ["RANK"]
        lines = [f"rank {rank} on {socket.gethostname()}: {line}" for line in problem.splitlines()]
        store.compare_set(_ABSENT, "", "\n".join(lines))
        store.add(_HEARD, 1)
        end = time.monotonic() + _LAST_WORDS
        while _keeps_the_store() and store.add(_HEARD, 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < end:
            time.sleep(0.1)


def _is_needed() -> bool:
    launched = launched_devices()
    return launched is not None and launched["num_nodes"] > 1 and not dist.is_initialized()


def _keeps_the_store() -> bool:
    """Whether the store ends with this process."""
    return os.environ["RANK"] == "0" and not lends_store()


def _store(timeout: float) -> Any:
    """The store by which ranks find each other, and which torch goes on with in this process."""
    c10d: Any = dist  # which exports its stores without saying so
    if not _held:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=timeout)
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True, "timeout": patience}
        _held.append(c10d.TCPStore(address, port, is_master=_keeps_the_store(), **options))
    # An agent's store outlives a start of its ranks; torch tells starts apart by the same number.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if lends_store() else "0"
    return c10d.PrefixStore(f"lit_stable/{start}", _held[0])
