"""One rank's part of a sharded checkpoint, copied to the host's memory now and written when it is told to.

``torch.distributed.checkpoint`` plans and writes in one go. Here it plans as ever, and copies where it would write; the
files that come of it later are those that it would have written. Its own ``async_save`` writes with ``torch.save``,
which holds the interpreter's lock for the whole of each tensor (see :mod:`.checkpoint_snapshot`), and speaks with the
other ranks from a thread, for which the process group needs a CPU backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .checkpoint_snapshot import Snapshot
from .private_storage_names import place_in_shard


class DeferredShards(FileSystemWriter):
    """A storage writer that copies what it is given; `write` and, on the coordinator, `write_metadata` make the files.

    Args:
        folder: The checkpoint's.
    """

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._held: list[tuple[MetadataIndex, Tensor | bytes]] = []
        self._metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what this rank is to write to the host's memory, page-locked where it comes from a CUDA device."""
        devices = set()
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if isinstance(data, Tensor):
                devices.add(data.device)
                self._held.append((item.index, _copy(data)))
            else:
                self._held.append((item.index, data.getvalue()))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        nothing_yet: Future[list[WriteResult]] = Future()
        nothing_yet.set_result([])
        return nothing_yet

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep what the coordinator knows of all ranks' parts, until it is known where in the files they lie."""
        self._metadata = metadata

    def write(self) -> list[WriteResult]:
        """Write and sync this rank's file, and give up the copies; what it holds, and where."""
        name, results = f"__{self._rank}_0.distcp", []
        held, self._held = self._held[::-1], []
        with open(os.path.join(self.path, name), "wb") as file:
            while held:
                index, data = held.pop()
                start = file.tell()
                if isinstance(data, Tensor):
                    Snapshot(data).write_to(file)
                else:
                    file.write(data)
                length = file.tell() - start
                results.append(WriteResult(index, length, place_in_shard(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        return results

    def write_metadata(self, results: list[list[WriteResult]]) -> None:
        """On the coordinator: write ``.metadata``, from what `write` has returned on each rank."""
        assert self._metadata is not None
        super().finish(self._metadata, results)


@contextmanager
def deferred_shards() -> Iterator[list[DeferredShards]]:
    """While active, sharded checkpoints are copied and not written; a list that gets what is to be written of each.

    Lightning's strategies import torch's ``save`` from its module whenever they save. One that writes shards in another
    way, as DeepSpeed's does, leaves the list empty.
    """
    deferred: list[DeferredShards] = []
    module: Any = distributed_checkpoint
    save = module.save

    def copy(state_dict: dict[str, Any], *, checkpoint_id: Any = None, **options: Any) -> Any:
        if checkpoint_id is None or "storage_writer" in options:  # in its own way
            return save(state_dict, checkpoint_id=checkpoint_id, **options)
        shards = DeferredShards(checkpoint_id)
        metadata = save(state_dict, storage_writer=shards, **options)
        deferred.append(shards)
        return metadata

    module.save = copy
    try:
        yield deferred
    finally:
        module.save = save


def _copy(tensor: Tensor) -> Tensor:
    on_cuda = tensor.device.type == "cuda"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
    return copy.copy_(tensor.detach(), non_blocking=on_cuda)
