"""Atomic saves: written under a temporary name, synced to disk, renamed; at once or in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import checkpoint_files as files
from .background_save import BackgroundSave
from .base import rank_zero_warn
from .checkpoint_contents import CheckpointError, or_not_written
from .piecewise_writes import piecewise_writes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class CheckpointWriter:
    """Wraps the ``save_checkpoint`` of a strategy; see ``SafeCheckpoints``.

    Attributes:
        background: The write in the background, on rank 0, which alone writes checkpoints of one file.
    """

    def __init__(self, in_background: bool) -> None:
        self.in_background = in_background
        self.background = BackgroundSave()
        self._has_warned = False

    def around(
        self, trainer: Trainer, save: Callable[..., None], listeners: Mapping[str, Callable[[Path], None]]
    ) -> Callable[..., None]:
        """A safe version of a strategy's ``save_checkpoint``.

        Args:
            save: The strategy's own.
            listeners: By name; each is called on every rank with a path before it is written.
        """

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            if "://" in str(filepath):
                save(checkpoint, filepath, storage_options=storage_options)
                return
            path = Path(trainer.strategy.broadcast(str(filepath))).expanduser()
            for _, listener in sorted(listeners.items()):
                listener(path)
            if self.in_background:
                path = path.absolute()  # the process may be in another folder when it is written
            self.background.finish()
            partial = files.partial_path(path)
            if trainer.is_global_zero:
                files.remove(partial)  # left over from a kill
            trainer.strategy.barrier()
            with self._removed_unless_written(path, trainer.is_global_zero):
                deferred = self._save(trainer, save, checkpoint, partial, storage_options)
                trainer.strategy.barrier()
                if partial.is_dir():
                    self._write_checksums(trainer, partial)
                if deferred:
                    path.parent.mkdir(parents=True, exist_ok=True)  # a link to the file can be made before the file
                    self.background.begin(lambda: self._write(path, deferred))
                elif trainer.is_global_zero:
                    files.publish(path)
            trainer.strategy.barrier()

        return save_checkpoint

    def around_removal(self, remove: Callable[..., None]) -> Callable[..., None]:
        """A strategy's ``remove_checkpoint`` that waits, without blocking, until the save under way is on disk."""

        def remove_checkpoint(filepath: Any) -> None:
            self.background.then(lambda: remove(filepath))

        return remove_checkpoint

    def _save(
        self, trainer: Trainer, save: Callable[..., None], checkpoint: dict[str, Any], path: Path, options: Any
    ) -> list[Callable[[], None]]:
        """Save, or return the functions that will write the copies: none on ranks that do not write."""
        with piecewise_writes(trainer.strategy.checkpoint_io, self.in_background) as deferred:
            save(checkpoint, path, storage_options=options)
        if self.in_background and trainer.is_global_zero and not deferred and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"in_background=True: {type(trainer.strategy).__name__} writes the shards of a checkpoint on all ranks"
                " together, so training waits for it; a strategy that writes one file (auto, ddp, fsdp2_full) does not."
            )
        return deferred

    def _write(self, path: Path, deferred: list[Callable[[], None]]) -> None:
        with self._removed_unless_written(path, True):
            for write in deferred:
                write()
            files.publish(path)

    @staticmethod
    @contextmanager
    def _removed_unless_written(path: Path, removes: bool) -> Iterator[None]:
        try:
            with or_not_written(path):
                yield
        except CheckpointError:
            if removes:
                files.remove(files.partial_path(path))  # it takes up the room that the disk lacks
            raise

    @staticmethod
    def _write_checksums(trainer: Trainer, folder: Path) -> None:
        own = files.shard_files(folder)[trainer.global_rank :: trainer.world_size]
        entries = [{str(p.relative_to(folder)): files.checksum(p) for p in own}]
        if trainer.world_size > 1:
            gathered: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(gathered, entries[0])
            entries = gathered
        if trainer.is_global_zero:
            files.write_checksums(folder, {name: entry for part in entries for name, entry in part.items()})
