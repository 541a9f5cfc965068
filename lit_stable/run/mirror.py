"""Copies of finished checkpoints in another place, made in the background and compared with what they are of."""

from __future__ import annotations

import json
import queue
import shutil
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lit_stable.callbacks.base import MisconfigurationException, rank_zero_warn
from lit_stable.callbacks.checkpoint_files import checksum, partial_path, remove, size_on_disk, sync_to_disk
from lit_stable.callbacks.whole_file import write_whole

RECORD = "mirrored.json"
_CHUNK = 1 << 24


class Target(Protocol):
    """Where copies go."""

    def clear(self, name: str) -> None:
        """Nothing of an unfinished copy of that name is to be left, nor what calls one whole that is written over."""

    def put(self, source: Path, name: str) -> tuple[int, int]:
        """Copy a file under a name, read the copy again, and return its (bytes, CRC-32)."""

    def finish(self, name: str) -> None:
        """Every file of a checkpoint of that name is there, and right."""


class PlainFolder:
    """A folder on any disk that is mounted; a copy has its name only when it is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def clear(self, name: str) -> None:
        """See :class:`Target`."""
        remove(partial_path(self.folder / name))

    def put(self, source: Path, name: str) -> tuple[int, int]:
        """See :class:`Target`."""
        top, _, rest = name.partition("/")
        path = partial_path(self.folder / top) / rest if rest else partial_path(self.folder / top)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        sync_to_disk(path)
        return checksum(path)

    def finish(self, name: str) -> None:
        """See :class:`Target`."""
        remove(self.folder / name)
        partial_path(self.folder / name).rename(self.folder / name)


class ObjectStore:
    """Whatever ``fsspec`` opens by a URL; a copy is whole when ``NAME.complete`` lies beside it."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise MisconfigurationException(
                f"checkpoints.mirror={url}: cannot be opened: {error}; install the package of fsspec for it, as s3fs."
            ) from error
        self._root = str(root).rstrip("/")

    def clear(self, name: str) -> None:
        """See :class:`Target`."""
        for path in (f"{self._root}/{name}.complete", f"{self._root}/{name}"):  # in this order: a kill may come between
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def put(self, source: Path, name: str) -> tuple[int, int]:
        """See :class:`Target`."""
        path = f"{self._root}/{name}"
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(source), path)
        size = crc = 0
        with self._fs.open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return size, crc

    def finish(self, name: str) -> None:
        """See :class:`Target`."""
        self._fs.pipe_file(f"{self._root}/{name}.complete", b"")


def open_target(where: str, run: Path) -> Target:
    """The folder ``NAME/NUMBER`` of a run below a URL or a path."""
    below = f"{run.parent.name}/{run.name}"
    if "://" in where:
        return ObjectStore(f"{where.rstrip('/')}/{below}")
    return PlainFolder(Path(where).expanduser() / below)


class Mirror:
    """A thread that copies checkpoints, oldest first, and a record of those whose copy was compared and is right.

    A copy that fails is tried again, ``attempts`` times, and later when the next checkpoint has been copied; training
    never waits for one, but at the end of the fit.

    Args:
        target: Where to.
        folder: Where the checkpoints and the record lie.
        attempts: Tries of one copy, >= 1.
        pause: Seconds before the second try; each further one waits twice as long.
    """

    def __init__(self, target: Target, folder: Path, attempts: int = 5, pause: float = 1.0) -> None:
        self.target, self.folder, self.attempts, self.pause = target, folder, attempts, pause
        self._waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._queued: set[str] = set()
        self._given_up: dict[str, Path] = {}  # by name, oldest first; of the thread alone
        self._lock = threading.Lock()
        self._verified = self._read()  # by name: which file or folder of that name it was
        self._thread: threading.Thread | None = None

    def _read(self) -> dict[str, list[int]]:
        path = self.folder / RECORD
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):  # none yet, or one that a kill has cut short: copied once more
            return {}
        return found if isinstance(found, dict) else {}

    def add(self, path: Path) -> None:
        """Copy a finished checkpoint, unless that is done or under way."""
        with self._lock:
            if self._verified.get(path.name) == identity(path) or path.name in self._queued:
                return
            self._queued.add(path.name)
        self._waiting.put(path)
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy_all, name="mirror", daemon=True)
            self._thread.start()

    def is_verified(self, path: Path) -> bool:
        """Whether a checkpoint's copy is there and right."""
        with self._lock:
            return self._verified.get(path.name) == identity(path)

    def close(self) -> None:
        """Wait until all that was added is copied, or was given up."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        self._thread = None

    def _copy_all(self) -> None:
        while (path := self._waiting.get()) is not None:
            if not self._is_copied(path):
                continue
            # Not before something could be copied: where the target is gone, all of them would fail once more.
            for failed in [path for path in self._given_up.values() if path.exists()]:
                self._is_copied(failed)

    def _is_copied(self, path: Path) -> bool:
        copied = identity(path)
        error = self._try(path)
        with self._lock:
            self._queued.discard(path.name)
            if error is None:
                self._verified[path.name] = copied
                if (error := self._write()) is not None:
                    del self._verified[path.name]  # or it would be deleted here with no record of the copy
        self._given_up.pop(path.name, None)
        if error is not None:
            self._given_up[path.name] = path
            rank_zero_warn(f"mirror of {path}: {error}; it stays where it is, and is copied with the next one.")
        return error is None

    def _try(self, path: Path) -> Exception | None:
        failed: Exception | None = None
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                self._copy(path)
            except Exception as error:  # whatever a file system raises, training must not end of it
                failed = error
            else:
                return None
        with suppress(Exception):  # it takes up room that the next copy may lack
            self.target.clear(path.name)
        return failed

    def _copy(self, path: Path) -> None:
        self.target.clear(path.name)
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            name = str(Path(path.name) / file.relative_to(path)) if path.is_dir() else path.name
            expected, found = checksum(file), self.target.put(file, name)
            if found != expected:
                raise OSError(f"the copy of {file} has (bytes, CRC-32) {found} instead of {expected}")
        self.target.finish(path.name)

    def _write(self) -> OSError | None:
        try:
            write_whole(self.folder / RECORD, json.dumps(self._verified))
        except OSError as error:  # a full disk, of which training tells where it needs it
            return error
        return None


def identity(path: Path) -> list[int]:
    """What tells a checkpoint from another of its name, written after a step back: bytes, time of writing."""
    return [size_on_disk(path), path.stat().st_mtime_ns] if path.exists() else []


def mirror_of(where: str | None, run: Path, checkpoints: Path, **options: Any) -> Mirror | None:
    """The mirror of a run, if it is to have one."""
    return None if where is None else Mirror(open_target(where, run), checkpoints, **options)
