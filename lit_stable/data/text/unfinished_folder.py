"""A folder of unfinished work that survives a kill and belongs to one process at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "lock"


def unfinished_folder(path: Path) -> Path:
    """Where the work on ``path`` is kept until it is done."""
    return path.with_name(f"{path.name}.unfinished")


@contextmanager
def locked_folder(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Create ``folder``, or take over what a killed process left of it, and hold its lock.

    The lock ends with the process that holds it, however it ends. Another process on the same machine waits; on file
    systems that share locks, on other machines too.

    Args:
        folder: The folder; who is inside may delete it.
        waiting: Called once when another process has to be waited for.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # deleted by who held the lock
            continue
        try:
            _lock(descriptor, waiting)
            if _is_same_file(descriptor, folder / LOCK_FILE):
                yield
                return
        finally:
            os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Delete a folder that may be gone in part or whole."""
    shutil.rmtree(folder, ignore_errors=True)


def _lock(descriptor: int, waiting: Callable[[], None]) -> None:
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: who starts twice there does the work twice
        return


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the file that was locked still has its name: who held the lock before may have deleted it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
