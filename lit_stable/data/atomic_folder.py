"""Write a folder that exists either whole or not at all under its name."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_stable.callbacks.not_written import writing


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder beside ``path`` that takes its name when the block ends without an exception.

    Files are flushed to disk before the rename, so a crash leaves either the whole folder or none. The scratch name
    holds host and process id: processes that write the same folder at once do not disturb each other, the first to
    finish wins, and what a killed process left behind is removed by the next one on that host.

    Raises:
        FileExistsError: when ``path`` exists, at the start or when the block ends.
        OSError: when it cannot be written; it names ``path``.
    """
    if path.exists():
        raise FileExistsError(f"{path}: exists already; choose another folder or delete it.")
    partial = path.with_name(f"{_scratch_prefix(path)}{os.getpid()}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(path)
            partial.mkdir()
            yield partial
            _flush(partial)
            _name(partial, path)
    except BaseException:  # Ctrl-C leaves nothing behind either
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _name(partial: Path, path: Path) -> None:
    try:
        partial.rename(path)
    except OSError as error:
        if path.exists():
            raise FileExistsError(f"{path}: another process wrote it first.") from error
        raise


def _scratch_prefix(path: Path) -> str:
    return f"{path.name}.partial-{socket.gethostname()}-"


def _remove_abandoned(path: Path) -> None:
    for partial in path.parent.iterdir():
        pid = partial.name.removeprefix(_scratch_prefix(path))
        if pid != partial.name and pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(partial, ignore_errors=True)  # two cleaners may meet here


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 is a question on POSIX only
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(folder: Path) -> None:
    for path in (entry for entry in folder.rglob("*") if entry.is_file()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
