"""A file that could not be written, on a full disk most of all: which one it is, and what is said of it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: No room; and no right to the place, which is also said of what may not be read.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name ``path`` in the error of a write, which tells no name, and of an opening, which tells that of a part."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*FULL, *FORBIDDEN) or not _is_part_of(error.filename, path):
            raise
        raise OSError(error.errno, error.strerror or os.strerror(error.errno), str(path)) from error


def _is_part_of(filename: object, path: Path) -> bool:
    # What is not whole yet lies below the name, or below the name with something behind it.
    return filename is None or str(filename).startswith(str(path)) or Path(str(filename)) in path.parents


def caused_by(error: BaseException | None, numbers: tuple[int, ...]) -> OSError | None:
    """The error of the system that another comes of, if it does: loggers write in threads of their own, and wrap it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in numbers:
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def not_written(path: Path, error: OSError) -> str:
    """The sentence about what could not be written."""
    why = reason(path, error)
    remedy = "go on from that elsewhere" if error.errno in FORBIDDEN else "make room and go on from that"
    return f"{path}: could not be written ({why}); what was saved before it is whole: {remedy}."


def reason(path: Path, error: OSError) -> str:
    """Why, and where the disk is full how much is free."""
    why = error.strerror or str(error)
    if error.errno not in FULL:
        return why
    there = next((parent for parent in (path, *path.parents) if parent.is_dir()), Path())
    return f"{why}; {shutil.disk_usage(there).free / 2**30:.3g} GiB are free there"
