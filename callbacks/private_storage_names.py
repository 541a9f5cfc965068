"""The private names of torch's files and checkpoints that the package touches: see :mod:`.private_names`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def as_stored(obj: Any) -> tuple[torch.UntypedStorage, torch.dtype, Any, int] | None:
    """Of a storage: its bytes, dtype, the class that stands for it in a file of torch's, and elements; else ``None``.

    Tensors hand over a typed storage, which is deprecated everywhere but in files.
    """
    if isinstance(obj, torch.storage.TypedStorage):
        typed: Any = obj
        return typed._untyped_storage, typed.dtype, getattr(torch, typed._pickle_storage_type()), typed._size()
    if isinstance(obj, torch.UntypedStorage):
        return obj, torch.uint8, torch.UntypedStorage, obj.nbytes()
    return None


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """What a tensor that is read takes; the inverse of :func:`as_stored`, but for a storage that had no dtype."""
    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


def place_in_shard(file: str, offset: int, length: int) -> Any:
    """Where an item of a sharded checkpoint lies, in bytes, as its metadata says it; readers know no other class."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # costs half a second to import

    return _StorageInfo(file, offset, length)


def default_store() -> Any:
    """The store by which the ranks found each other: what may pass between their threads without a collective."""
    return dist.distributed_c10d._get_default_store()
