"""Lines added to a file so that all of them are on disk, or none."""

from __future__ import annotations

import os
from pathlib import Path


def append_lines(path: Path, lines: list[str]) -> None:
    """Add lines, without their ends, and wait until they are on disk; the folder is made where it is missing.

    Raises:
        OSError: when they cannot be written; the file is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        size = os.lseek(handle, 0, os.SEEK_END)
        try:
            # A line that was cut short must not swallow this one.
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            _write_all(handle, (("\n" if torn else "") + "".join(f"{line}\n" for line in lines)).encode())
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
