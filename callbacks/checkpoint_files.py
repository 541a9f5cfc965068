"""Checkpoint files that are whole or absent, and that tell when they were damaged.

A checkpoint is a file (full) or a folder (sharded). It is written beside its name as ``NAME.partial`` and renamed when
all of it is on disk. A file needs no side file: torch's zip format carries a CRC-32 of every record (which torch does
not check when it loads). A folder gets ``checksums.json`` with the size and CRC-32 of each of its files.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
import zlib
from pathlib import Path

CHECKSUMS = "checksums.json"
PARTIAL, REPLACED = ".partial", ".replaced"
_CHUNK = 1 << 24


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return path.with_name(path.name + PARTIAL)


def checksum(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def shard_files(folder: Path) -> list[Path]:
    """The files of a sharded checkpoint, in one order for all ranks, without the list of checksums itself."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CHECKSUMS)


def write_checksums(folder: Path, entries: dict[str, tuple[int, int]]) -> None:
    """Store the checksums of a sharded checkpoint's files, by name relative to the folder."""
    (folder / CHECKSUMS).write_text(json.dumps(entries, indent=1, sort_keys=True))


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk: a rename must not overtake what it names."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(path: Path) -> None:
    """Rename ``NAME.partial`` to ``NAME``. Killed at any moment, the old or the new checkpoint is whole on disk."""
    partial, replaced = partial_path(path), path.with_name(path.name + REPLACED)
    for part in [*partial.rglob("*"), partial]:  # rglob finds nothing below a file
        sync_to_disk(part)
    if path.exists():
        remove(replaced)  # left over from a kill after both renames
        if partial.is_dir() or path.is_dir():  # a folder cannot be replaced by a rename; see `recover`
            path.rename(replaced)
    partial.replace(path)
    sync_to_disk(path.parent)
    remove(replaced)


def recover(path: Path) -> None:
    """Finish a publish that was killed between its two renames."""
    replaced = path.with_name(path.name + REPLACED)
    if not path.exists() and replaced.exists():
        replaced.rename(path)


def remove(path: Path) -> None:
    """Delete a checkpoint, file or folder; nothing happens if there is none."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_on_disk(path: Path) -> int:
    """Bytes of a checkpoint, file or folder."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def content_digest(path: Path) -> str:
    """A CRC-32 over the checksums that a checkpoint holds of its content: cheap, and alike for copies alone."""
    try:
        if path.is_dir():
            listing = path / CHECKSUMS
            held = (listing if listing.is_file() else path / ".metadata").read_bytes()
        else:
            with zipfile.ZipFile(path) as archive:
                held = repr([(entry.filename, entry.CRC) for entry in archive.infolist()]).encode()
    except (OSError, zipfile.BadZipFile):  # who loads it will say why
        return ""
    return f"{zlib.crc32(held):08x}"


def damage(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, in a phrase that names the file; ``None`` if it is whole.

    Args:
        path: A checkpoint file or folder. One not written by this package is checked as far as it allows.
        part: Of a folder's files look at every ``parts``-th, from this one on, so that ranks share the reading.
        parts: See ``part``.
    """
    if not path.exists():
        return f"{path} does not exist"
    if path.is_dir():
        return _folder_damage(path, part, parts)
    if part:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                return f"{path} is no checkpoint: a zip file, and not one of torch"
    except Exception as error:  # a flipped bit in a header raises nearly anything: codecs, decompressors, passwords
        return f"{path} is no complete checkpoint file ({error})"
    return f"{path} is damaged: its record {record} does not match its checksum" if record else None


def _folder_damage(folder: Path, part: int, parts: int) -> str | None:
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return None if (folder / ".metadata").is_file() else f"{folder} is no checkpoint: it holds no .metadata file"
    try:
        entries: dict[str, list[int]] = json.loads(listing.read_text())
    except ValueError as error:  # what json and the UTF-8 decoder raise
        return f"{listing} is damaged ({error})"
    for index, (name, expected) in enumerate(sorted(entries.items())):
        if index % parts != part:
            continue
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if list(checksum(file)) != expected:
            return f"{file} is damaged: it does not match its checksum"
    return None
