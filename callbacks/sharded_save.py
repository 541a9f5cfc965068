"""The writing of a sharded checkpoint by threads of all ranks, and its name when every part is on disk."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import checkpoint_files as files
from .checkpoint_contents import CheckpointError, or_not_written
from .private_storage_names import default_store
from .rank_gather import this_rank
from .shared_folder import not_all_there, not_seen, unseen

if TYPE_CHECKING:
    from .deferred_shards import DeferredShards

_POLLED = 0.05  # seconds between looks at what the other ranks say
_PATIENCE = 20.0  # seconds for the other ranks when this one is about to end
_LONGEST = timedelta(minutes=30)  # torch's for a collective

_numbers = itertools.count()  # of this process; ranks save alike


class ShardedSave:
    """One checkpoint: each rank writes its shards, rank 0 what is about all of them, and renames the folder.

    Threads of several ranks cannot take part in collectives, which training orders as it goes; they tell each other by
    the store of the process group. Every rank learns how it ended: if any could not write, all raise, and nothing is
    left of it.

    Args:
        path: The checkpoint's name when it is whole.
        shards: This rank's part of it.
        timeout: How long to wait for another rank; ``None``: 30 minutes.
    """

    def __init__(self, path: Path, shards: DeferredShards, timeout: timedelta | None) -> None:
        self._path, self._shards = path, shards
        self._timeout = (timeout or _LONGEST).total_seconds()
        self._rank, self._ranks, self._number = dist.get_rank(), dist.get_world_size(), next(_numbers)
        self._store = default_store()
        self._hurried = threading.Event()

    def hurry(self) -> None:
        """Wait no longer than 20 s for any other rank: this one is about to end, and another may have ended."""
        self._hurried.set()

    def write(self) -> None:
        """Write, and return when the checkpoint is whole. Called on every rank, in a thread.

        Raises:
            CheckpointError: when a rank could not write its part, or did not say in time that it has.
        """
        told = self._try(self._write_together)
        if isinstance(told, CheckpointError):
            raise told

    def _write_together(self) -> CheckpointError | None:
        self._tell(self._part(self._rank), self._try(self._write_part))
        told: CheckpointError | None
        if self._rank:
            told = self._hear(self._end(self._number), 0)
            return told
        told = self._try(self._publish)
        if told is not None:
            files.remove(files.partial_path(self._path))
        self._tell(self._end(self._number), told)
        return told

    def _write_part(self) -> tuple[list[Any], dict[str, tuple[int, int]]]:
        """What this rank wrote where, and the checksum of each of its files."""
        folder = files.partial_path(self._path)
        if unseen([folder]):
            raise CheckpointError(not_seen(self._path, this_rank()))
        results = self._shards.write()
        names = {result.storage_data.relative_path for result in results}
        return results, {name: files.checksum(folder / name) for name in names}

    def _publish(self) -> None:
        parts = [self._hear(self._part(rank), rank) for rank in range(self._ranks)]
        for part in parts:
            if isinstance(part, CheckpointError):
                raise part
        folder = files.partial_path(self._path)
        if hidden := unseen(folder / name for _, entries in parts for name in entries):
            raise CheckpointError(not_all_there(self._path, [str(file.relative_to(folder)) for file in hidden]))
        self._shards.write_metadata([results for results, _ in parts])
        checksums = {name: entry for _, entries in parts for name, entry in entries.items()}
        rest = [file for file in files.shard_files(folder) if str(file.relative_to(folder)) not in checksums]
        checksums |= {str(file.relative_to(folder)): files.checksum(file) for file in rest}
        files.write_checksums(folder, checksums)
        files.publish(self._path)
        for rank in range(self._ranks):
            self._store.delete_key(self._part(rank))
        if self._number:  # every rank has heard how the one before ended: it began this one
            self._store.delete_key(self._end(self._number - 1))

    def _try(self, act: Callable[[], Any]) -> Any:
        """What ``act`` returns, or why it could not."""
        try:
            with or_not_written(self._path):
                return act()
        except CheckpointError as error:
            return error
        except Exception as error:
            return CheckpointError(f"{self._path}: could not be written ({type(error).__name__}: {error}).")

    def _part(self, rank: int) -> str:
        return f"lit_stable/save/{self._number}/{rank}"

    @staticmethod
    def _end(number: int) -> str:
        return f"lit_stable/save/{number}/end"

    def _tell(self, key: str, thing: Any) -> None:
        self._store.set(key, pickle.dumps(thing))

    def _hear(self, key: str, rank: int) -> Any:
        """What a rank tells under a key, an error too; or that it tells nothing."""
        began = time.monotonic()
        hurried_at = None
        while not self._store.check([key]):
            now = time.monotonic()
            if hurried_at is None and self._hurried.is_set():
                hurried_at = now
            if now - began > self._timeout or (hurried_at is not None and now - hurried_at > _PATIENCE):
                return CheckpointError(
                    f"{self._path}: rank {rank} has not said within {now - began:.0f} s that its part is written; what"
                    " was saved before it is whole: go on from that."
                )
            time.sleep(_POLLED)
        return pickle.loads(self._store.get(key))
