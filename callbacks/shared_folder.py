"""Folders that every rank writes into: whether all hosts see one folder there, or each has its own of that name."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from .base import MisconfigurationException
from .rank_gather import gather_objects, this_rank

#: Seconds for which a rank looks again for a file that it does not see: a file system may show it late.
PATIENCE = 10.0
_FEW = 3


def refuse_unshared(folder: Path) -> None:
    """Raise on all ranks where one of them does not see the folder of rank 0; called by all of them.

    Raises:
        MisconfigurationException: naming the first such rank and its host.
    """
    if other := who_does_not_see(folder):
        raise MisconfigurationException(not_seen(folder, other))


def who_does_not_see(folder: Path) -> str | None:
    """The first rank that does not see rank 0's folder, as ``rank 2 on HOST``; ``None``: all do. A collective.

    Rank 0 writes an empty file of a name that nobody has used, there or in the nearest folder above that exists, and
    the others look for it; a relative path is taken from where each of them is. Where rank 0 cannot write, nobody is
    named: what is to be written there will tell.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    token = _written(folder) if dist.get_rank() == 0 else None
    token = gather_objects(token)[0]
    if token is None:
        return None
    found = gather_objects((this_rank(), not unseen([token])))
    if dist.get_rank() == 0:
        with suppress(OSError):
            token.unlink(missing_ok=True)
    return next((rank for rank, sees in found if not sees), None)


def _written(folder: Path) -> Path | None:
    there = next((place for place in (folder, *folder.parents) if _is_there(place)), None)
    if there is None:
        return None
    token = there / f".seen-by-all-{uuid.uuid4().hex}"
    try:
        token.touch()
    except OSError:
        return None
    return token


def unseen(paths: Iterable[Path]) -> list[Path]:
    """Those that this rank does not see, nor within the next 10 s."""
    end = time.monotonic() + PATIENCE
    left = [path for path in paths if not _is_there(path)]
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left = [path for path in left if not _is_there(path)]
    return left


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # it may not look there
        return False


def not_seen(folder: Path, rank: str) -> str:
    """The sentence about a folder that a rank, as `who_does_not_see` names it, does not see."""
    return (
        f"{folder}: {rank} does not see the folder that rank 0 sees there, and each rank writes its part of a"
        " checkpoint into it; give the absolute path of one on a file system that all hosts share."
    )


def not_all_there(path: Path, names: Iterable[str]) -> str:
    """The sentence about files of a sharded checkpoint that one rank has written and another does not see."""
    names = sorted(set(names))
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return (
        f"{path}: {', '.join(names[:_FEW])}{more} in it: not seen by every rank, so it would be incomplete; save to"
        " the absolute path of a folder on a file system that all hosts share."
    )
