"""Checkpoints of one file, written by a thread from a copy in the host's memory while training goes on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class BackgroundSave:
    """Writes one checkpoint at a time in a thread, for whose end the interpreter waits before it exits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._written: threading.Event | None = None
        self._failed: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._written is not None and not self._written.is_set()

    def begin(self, write: Callable[[], None]) -> None:
        """Wait for the checkpoint before, then start a thread that calls ``write``.

        Raises:
            BaseException: what the write before has raised.
        """
        self.finish()
        self._written = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(write, self._written), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None], written: threading.Event) -> None:
        try:
            write()
        except BaseException as error:  # raised in the training thread, by `finish`
            self._failed = error
        finally:
            written.set()

    def then(self, act: Callable[[], None]) -> None:
        """Call ``act`` when the checkpoint that is being written is on disk; at once if none is, never if it fails."""
        if self._thread is None:
            act()
        else:
            self._then.append(act)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and do what waits for it; raise what its write raised."""
        if self._written is None:
            return
        # No `join`: interrupted by a signal's exception, Python 3.11 takes the thread for ended, and does not wait for
        # it at exit either.
        self._written.wait()
        failed, self._thread, self._written, self._failed = self._failed, None, None, None
        waiting, self._then = self._then, []
        if failed is not None:
            raise failed
        for act in waiting:
            act()


@contextmanager
def deferred_writes(io: Any) -> Iterator[list[Callable[[], None]]]:
    """While active, a ``CheckpointIO`` copies a checkpoint instead of writing it.

    Yields:
        A list that gets, for each save, a function that writes the copy. It stays empty on ranks that write nothing,
        and under strategies that write shards, which use no ``CheckpointIO``.
    """
    deferred: list[Callable[[], None]] = []
    write, own = io.save_checkpoint, vars(io).get("save_checkpoint")

    def defer(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        deferred.append(partial(write, host_copy(checkpoint), path, storage_options))

    io.save_checkpoint = defer
    try:
        yield deferred
    finally:
        del io.save_checkpoint
        if own is not None:
            io.save_checkpoint = own


def host_copy(tree: Any) -> Any:
    """A deep copy, with tensors in the host's memory, that training does not change.

    Tensors that share storage share it in the copy too, so that tied weights are written once.

    Args:
        tree: A checkpoint: nested dictionaries, lists and tuples of tensors and anything that can be deep-copied.
    """
    return _copied(tree, {})


def _copied(tree: Any, storages: dict[tuple[torch.device, int], torch.UntypedStorage]) -> Any:
    if type(tree) in (Tensor, nn.Parameter):
        if not _is_plain(tree):
            return tree.detach().clone()
        storage = tree.untyped_storage()
        key = (storage.device, storage.data_ptr())
        if key not in storages or storages[key].nbytes() != storage.nbytes():
            storages[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        own = torch.empty(0, dtype=tree.dtype, device="cpu")  # whatever the default device is
        own.set_(storages[key], tree.storage_offset(), tree.size(), tree.stride())
        return nn.Parameter(own, tree.requires_grad) if type(tree) is nn.Parameter else own
    if isinstance(tree, dict):
        same = copy.copy(tree)  # keeps the type, and `_metadata`, the attribute of a state dict with its versions
        for key in tree:
            same[key] = _copied(tree[key], storages)
        return same
    if type(tree) in (list, tuple):
        return type(tree)(_copied(each, storages) for each in tree)
    return copy.deepcopy(tree)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is but a view into a storage; not so a sparse, quantized or lazily conjugated or negated one."""
    odd = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested
    return tensor.layout is torch.strided and not tensor.is_meta and not odd
