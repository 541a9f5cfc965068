"""A small file that is whole or as it was, whenever its writer is killed and however full the disk."""

from __future__ import annotations

import os
from pathlib import Path

from .checkpoint_files import partial_path, sync_to_disk


def file_in_the_way(path: Path) -> Path | None:
    """The file that stands where a path has a folder, if there is one: nothing can be written below it."""
    there = next((parent for parent in path.parents if parent.exists()), None)
    return there if there is not None and not there.is_dir() else None


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its name, wait until it is on disk, and rename it.

    Raises:
        OSError: when it cannot be written; it names the file, which is then as it was.
    """
    partial = partial_path(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_to_disk(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
