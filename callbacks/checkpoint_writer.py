"""Atomic saves: written under a temporary name, synced to disk, renamed; at once or in the background."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import checkpoint_files as files
from .background_save import BackgroundSave
from .base import rank_zero_warn
from .checkpoint_contents import CheckpointError, or_not_written
from .host_agreement import HostAgreement
from .piecewise_writes import piecewise_writes
from .private_names import collective_timeout
from .rank_gather import gather_objects
from .sharded_save import ShardedSave
from .shared_folder import not_all_there, unseen

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from .deferred_shards import DeferredShards


class CheckpointWriter:
    """Wraps the ``save_checkpoint`` of a strategy; see ``SafeCheckpoints``.

    Attributes:
        background: The write in the background: of one file on rank 0 alone, of shards on all ranks.
    """

    def __init__(self, in_background: bool) -> None:
        self.in_background = in_background
        self.background = BackgroundSave()
        self._shards: ShardedSave | None = None  # being written, as far as all ranks have agreed
        self._ranks = HostAgreement()
        self._others_write: Callable[[], list[int]] | None = None  # on how many ranks; asked behind the batch before
        self._has_warned = False

    def open(self, trainer: Trainer) -> None:
        """To be called in ``setup``."""
        if self.in_background:
            self._ranks.open(trainer)

    def close(self) -> None:
        """To be called in ``teardown``, after `finish`."""
        self._ranks.close()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background, of shards: or was, when ranks last agreed on it."""
        return self._shards is not None or self.background.is_under_way

    def finish(self) -> None:
        """Wait for a write in the background, and raise what it raised. Of shards, called by all ranks alike."""
        asked, self._others_write, self._shards = self._others_write, None, None
        if asked is not None:
            asked()
        self.background.finish()

    def finish_if_written(self) -> None:
        """Behind every batch: as `finish`, once nothing is to be waited for; of shards on all ranks behind the same."""
        if self._shards is not None:
            asked, self._others_write = self._others_write, None
            if asked is None or asked() != [0]:
                self._others_write = self._ranks.begin_sums([int(self.background.is_under_way)])
                return
        if not self.background.is_under_way:
            self.finish()

    def give_up(self) -> None:
        """Before this rank ends with an exception: as `finish`, but no longer waiting for ranks that may have ended."""
        if self._shards is not None:
            self._shards.hurry()
        self._others_write = self._shards = None
        self.background.finish()

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
            self.finish()
            partial = files.partial_path(path)
            if trainer.is_global_zero:
                files.remove(partial)  # left over from a kill
            trainer.strategy.barrier()
            with self._removed_unless_written(path, trainer.is_global_zero):
                later = self._save(trainer, save, checkpoint, path, storage_options)
                trainer.strategy.barrier()
                is_later = self.in_background and any(gather_objects(later is not None))  # a file's on rank 0 alone
                if later is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)  # a link to the file can be made before the file
                    self.background.begin(later)
                elif not is_later:
                    self._write_checksums(trainer, path)
                    if trainer.is_global_zero:
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
    ) -> Callable[[], None] | None:
        """Save under the temporary name; or copy, and return what will write the copy: nothing on ranks without any."""
        io = trainer.strategy.checkpoint_io
        with piecewise_writes(io, self.in_background) as deferred, self._copied_shards() as shards:
            save(checkpoint, files.partial_path(path), storage_options=options)
        if shards:
            self._shards = ShardedSave(path, shards[0], collective_timeout(trainer))
            return self._shards.write
        if deferred:
            return lambda: self._write(path, deferred)
        if self.in_background and trainer.is_global_zero and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"in_background=True: {type(trainer.strategy).__name__} writes a checkpoint in a way of its own, so"
                " training waits for it; auto, ddp, fsdp and fsdp2 write in the background."
            )
        return None

    def _copied_shards(self) -> AbstractContextManager[list[DeferredShards]]:
        if not (self.in_background and dist.is_initialized()):
            return nullcontext([])
        from .deferred_shards import deferred_shards  # costs half a second

        return deferred_shards()

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
    def _write_checksums(trainer: Trainer, path: Path) -> None:
        """Of a folder; a file has its own."""
        folder = files.partial_path(path)
        names = sorted(set().union(*gather_objects({str(p.relative_to(folder)) for p in files.shard_files(folder)})))
        if not names:
            return
        own = names[trainer.global_rank :: trainer.world_size]
        looked_for = own if trainer.global_rank else names
        hidden_here = {str(p.relative_to(folder)) for p in unseen(folder / name for name in looked_for)}
        if hidden := set().union(*gather_objects(hidden_here)):
            shutil.rmtree(folder, ignore_errors=True)  # this host's
            raise CheckpointError(not_all_there(path, hidden))
        entries = gather_objects({name: files.checksum(folder / name) for name in own})
        if trainer.is_global_zero:
            files.write_checksums(folder, {name: entry for part in entries for name, entry in part.items()})
