"""Folders that every rank writes into: whether all hosts see one folder there, or each has its own of that name."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from .base import MisconfigurationException
from .rank_gather import gather_objects

_FEW = 3


def refuse_unshared(folder: Path) -> None:
    """Raise on all ranks where one of them does not see the folder of rank 0; called by all of them.

    Raises:
        MisconfigurationException: naming the first such rank and its host.
    """
    if other := who_does_not_see(folder):
        raise MisconfigurationException(not_seen(folder, other))


def who_does_not_see(folder: Path) -> str | None:
    """The first rank that does not see the folder of rank 0, as ``rank 2 on HOST``; ``None``: all do. A collective.

    Rank 0 writes an empty file of a name that nobody has used, there or in the nearest folder above that exists, and
    the others look for it. Where rank 0 cannot write, nobody is named: what is to be written there will tell.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    name = f".seen-by-all-{uuid.uuid4().hex}"
    places = [folder, *folder.parents]  # relative ones stay so: each rank looks from where it is
    number = next((number for number, place in enumerate(places) if place.is_dir()), 0)
    if dist.get_rank() == 0:
        with suppress(OSError):
            (places[number] / name).touch()
    number, name, is_written = gather_objects((number, name, (places[number] / name).is_file()))[0]
    token = places[number] / name
    found = gather_objects((socket.gethostname(), token.is_file()))
    if dist.get_rank() == 0:
        with suppress(OSError):
            token.unlink(missing_ok=True)
    if not is_written:
        return None
    return next((f"rank {rank} on {host}" for rank, (host, sees) in enumerate(found) if not sees), None)


def not_seen(folder: Path, rank: str) -> str:
    """The sentence about a folder that a rank does not see, given as `who_does_not_see` does."""
    return (
        f"{folder}: {rank} does not see the folder that rank 0 sees there, and each rank writes its part of a"
        " checkpoint into it; give the absolute path of one on a file system that all hosts share."
    )


def not_all_there(path: Path, names: Sequence[str]) -> str:
    """The sentence about files of a sharded checkpoint that one rank has written and another does not see."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return (
        f"{path}: {', '.join(names[:_FEW])}{more} in it: not seen by every rank, so it would be incomplete; save to"
        " the absolute path of a folder on a file system that all hosts share."
    )
