"""A run folder has one process that writes into it: the others are told which, and no two go on in one folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: nobody is told anything, nobody is refused
    fcntl = None  # type: ignore[assignment]

LOCK = "under_way.json"
"""Locked, byte 0, while a fit in the folder is under way, and says by whom; what it says alone means nothing."""

_PATIENCE, _POLL = 5.0, 0.01  # seconds


class UnderWay:
    """The lock of one run folder.

    It is a lock of the process (POSIX): a kill of any kind frees it, and data workers do not inherit it. A file system
    without locks refuses nobody.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, folder: Path) -> str | None:
        """Hold the folder from now on; where another process holds it, nothing but what it says of itself.

        That is ``process 71 on node3 since 2026-...``. One that is held already is not let go in between.
        """
        path = folder / LOCK
        if self._file is not None and Path(self._file.name) == path:
            return None
        self.give_back()
        self._file = path.open("a+")
        until = time.monotonic() + _PATIENCE
        while _lock(self._file) is False:
            if not is_free(folder) or time.monotonic() > until:
                self.give_back()
                return _named(path)
            time.sleep(_POLL)  # whoever only looked has it no longer
        self._file.truncate(0)
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        json.dump({"host": socket.gethostname(), "process": os.getpid(), "since": since}, self._file)
        self._file.flush()
        return None

    def give_back(self) -> None:
        if self._file is not None:
            self._file.close()  # which frees it
            self._file = None


def is_free(folder: Path) -> bool:
    """Whether no process trains in a folder; ``False`` too where there are no locks, so that nobody can tell.

    Not for the process that holds it: to look is to free it.
    """
    path = folder / LOCK
    if not path.is_file():
        return True
    with path.open() as file:
        return _lock(file, shared=True) is True


def _named(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
    except ValueError:  # it is about to write
        found = {}
    found = found if isinstance(found, dict) else {}
    return f"process {found.get('process', '?')} on {found.get('host', '?')} since {found.get('since', '?')}"


def _lock(file: IO[str], shared: bool = False) -> bool | None:
    """Whether nobody else holds it, so that this process does until the file is closed; ``None``: there are no locks.

    Args:
        file: Open for writing, or, for a shared lock, for reading.
        shared: Keep out those who take it, and not those who look too.
    """
    if fcntl is None:
        return None
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, 1)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True
