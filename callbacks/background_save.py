"""Checkpoints of one file, written piece by piece, by a thread while training goes on if that is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .checkpoint_snapshot import Snapshot


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
def piecewise_writes(io: Any, in_background: bool) -> Iterator[list[Callable[[], None]]]:
    """While active, a ``CheckpointIO`` saves a :class:`Snapshot`, at once or when it is told to.

    One that is not Lightning's own writes what it wants of the snapshot's tree, and at once is left alone.

    Args:
        io: Of the trainer's strategy.
        in_background: Copy the checkpoint to the host's memory instead of writing it.

    Yields:
        A list that in the background gets, for each save, a function that writes the copy. It stays empty on ranks that
        write nothing, and under strategies that write shards, which use no ``CheckpointIO``.
    """
    deferred: list[Callable[[], None]] = []
    write, own = io.save_checkpoint, vars(io).get("save_checkpoint")
    is_plain = _is_lightnings(io) and own is None

    def save(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or not (is_plain or in_background):
            write(checkpoint, path, storage_options)
            return
        snapshot = Snapshot(checkpoint)
        if in_background:
            snapshot.copy_to_host()
        act = partial(_write_file, snapshot, path) if is_plain else partial(_write_tree, write, snapshot, path)
        if in_background:
            deferred.append(act)
        else:
            act()

    io.save_checkpoint = save
    try:
        yield deferred
    finally:
        del io.save_checkpoint
        if own is not None:
            io.save_checkpoint = own


def _write_file(snapshot: Snapshot, path: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    snapshot.write(path)


def _write_tree(write: Callable[..., None], snapshot: Snapshot, path: Any) -> None:
    write(snapshot.tree(), path)


def _is_lightnings(io: Any) -> bool:
    """Whether it writes a file of torch's; of either of Lightning's namespaces, of which one may not be installed."""
    kind = type(io)
    return kind.__name__ == "TorchCheckpointIO" and kind.__module__.split(".")[0] in ("lightning", "lightning_fabric")
