"""A run folder has one process that writes into it: the others are told which, and no two go on in one folder."""

from __future__ import annotations

import errno
import json
import os
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: nobody is told anything, nobody is refused
    fcntl = None  # type: ignore[assignment]

LOCK = "under_way.json"
"""Locked, byte 0, while a fit in the folder is under way, and says by whom; what it says alone means nothing."""


class UnderWay:
    """The lock of one run folder.

    It is a lock of the process (POSIX): a kill of any kind frees it, and data workers do not inherit it. A file system
    without locks refuses nobody.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, folder: Path) -> str | None:
        """Hold the folder from now on; where another process holds it, nothing but what it says of itself."""
        self.give_back()
        file = (folder / LOCK).open("a+")
        if not _lock(file):
            file.close()
            return holder(folder) or "a process that ends just now"
        file.truncate(0)
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        json.dump({"host": socket.gethostname(), "process": os.getpid(), "since": since}, file)
        file.flush()
        self._file = file
        return None

    def give_back(self) -> None:
        if self._file is not None:
            self._file.close()  # which frees it
            self._file = None


def holder(folder: Path) -> str | None:
    """Which process trains in a folder, as ``process 71 on node3 since 2026-...``; ``None`` where none does, as far as
    the file system tells. Not for the process that holds it: to look is to free it."""
    path = folder / LOCK
    if not path.is_file():
        return None
    with path.open("r+") as file:
        if _lock(file):
            return None
        try:
            found = json.load(file)
        except ValueError:  # it is about to write
            found = {}
    return f"process {found.get('process', '?')} on {found.get('host', '?')} since {found.get('since', '?')}"


def _lock(file: IO[str]) -> bool:
    """Whether nobody else holds it; then this process does until the file is closed."""
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # of other errors it is no lock that is the cause
    return True
