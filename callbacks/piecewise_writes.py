"""How a ``CheckpointIO`` saves while :class:`~.safe_checkpoints.SafeCheckpoints` is there: piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .checkpoint_snapshot import Snapshot


@contextmanager
def piecewise_writes(io: Any, in_background: bool) -> Iterator[list[Callable[[], None]]]:
    """While active, a ``CheckpointIO`` saves a :class:`Snapshot`, at once or when it is told to.

    One that is not Lightning's own is left alone where it saves at once; in the background it gets the snapshot's tree.

    Args:
        io: Of the trainer's strategy.
        in_background: Copy the checkpoint to the host's memory instead of writing it.

    Yields:
        A list that in the background gets, for each save, a function that writes the copy. It stays empty on ranks that
        write nothing, and under strategies that write shards, which use no ``CheckpointIO``.
    """
    deferred: list[Callable[[], None]] = []
    write, own = io.save_checkpoint, vars(io).get("save_checkpoint")
    is_lightnings = _is_lightnings(io) and own is None

    def save(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        refuses = is_lightnings and storage_options is not None  # in its own words, and at once
        if refuses or not (is_lightnings or in_background):
            write(checkpoint, path, storage_options)
            return
        snapshot = Snapshot(checkpoint)
        if in_background:
            snapshot.copy_to_host()
        if is_lightnings:
            write_snapshot = partial(_write_file, snapshot, path)
        else:
            write_snapshot = partial(_write_tree, write, snapshot, path, storage_options)
        if in_background:
            deferred.append(write_snapshot)
        else:
            write_snapshot()

    io.save_checkpoint = save
    try:
        yield deferred
    finally:
        del io.save_checkpoint
        if own is not None:
            io.save_checkpoint = own


def _write_file(snapshot: Snapshot, path: Any) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    snapshot.write(file)


def _write_tree(write: Callable[..., None], snapshot: Snapshot, path: Any, storage_options: Any) -> None:
    write(snapshot.tree(), path, storage_options)


def _is_lightnings(io: Any) -> bool:
    """Whether it writes a file of torch's; of either of Lightning's namespaces, of which one may not be installed."""
    kind = type(io)
    return kind.__name__ == "TorchCheckpointIO" and kind.__module__.split(".")[0] in ("lightning", "lightning_fabric")
