"""A checkpoint of one file, written from a copy on the host while training goes on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


class BackgroundSave:
    """Writes one checkpoint at a time in a thread, for which the interpreter waits before it exits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, write: Callable[[], None]) -> None:
        """Write, when the one before is written."""
        self.finish()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # told to the thread that trains
            self._failed = error

    def finish(self) -> None:
        """Wait for the one that is being written; raise what it raised, once."""
        if self._thread is None:
            return
        self._thread.join()
        failed, self._thread, self._failed = self._failed, None, None
        if failed is not None:
            raise failed


@contextmanager
def held_back(io: Any) -> Iterator[list[Callable[[], None]]]:
    """Within it a ``CheckpointIO`` copies what it is to write; what is yielded gets a function that writes it.

    Strategies that write shards on every rank do so without one, and nothing is held back.
    """
    held: list[Callable[[], None]] = []
    write = io.save_checkpoint

    def hold(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        held.append(partial(write, host_copy(checkpoint), path, storage_options))

    io.save_checkpoint = hold
    try:
        yield held
    finally:
        del io.save_checkpoint


def host_copy(tree: Any) -> Any:
    """A copy that nothing which training does can reach: tensors on the host, everything else of its own.

    Tensors that share memory share it in the copy, so that a tied matrix is written once.

    Args:
        tree: Mappings, lists and tuples of tensors and of whatever else a checkpoint holds.
    """
    return _copied(tree, {})


def _copied(tree: Any, storages: dict[tuple[torch.device, int], torch.UntypedStorage]) -> Any:
    if type(tree) in (Tensor, torch.nn.Parameter):
        storage = tree.untyped_storage()
        key = (storage.device, storage.data_ptr())
        if key not in storages or storages[key].nbytes() != storage.nbytes():
            storages[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        own = torch.empty(0, dtype=tree.dtype)
        return own.set_(storages[key], tree.storage_offset(), tree.size(), tree.stride())
    if isinstance(tree, Mapping):
        same = copy.copy(tree)  # its type, and the versions that a state dict carries as an attribute
        for key in tree:
            same[key] = _copied(tree[key], storages)  # type: ignore[index]
        return same
    if type(tree) in (list, tuple):
        return type(tree)(_copied(each, storages) for each in tree)
    return copy.deepcopy(tree)
