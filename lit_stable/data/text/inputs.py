"""From what a person names, files, folders, patterns, data sets, to pieces of work in the order of the output."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_stable.data.text.compressed import is_compressed, plain_suffix
from lit_stable.data.text.documents import Fields
from lit_stable.data.text.tables import DATASET_PREFIX, dataset_size, is_saved_dataset, row_group_bytes

# A piece is what one process takes at a time: about 15 seconds of work, and what a killed one loses.
PIECE_BYTES = 64 << 20
DATASET_ROWS = 20_000
LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")

Kind = Literal["lines", "text", "parquet", "dataset"]


@dataclass(frozen=True)
class Piece:
    """A stretch of the input, read by one process from its start to its end.

    Args:
        kind: ``lines`` of one file of JSON records, ``text`` files, row groups of a ``parquet`` file, or rows of a
            ``dataset``.
        files: Paths, or the name of the data set.
        start: First byte, row group or row.
        stop: The one behind the last; None: up to the end.
        size: Bytes on disk, estimated for tables: what the progress line counts.
        stamp: Sizes and times of change of the files: a piece of a changed file is another piece.
    """

    kind: Kind
    files: tuple[str, ...]
    start: int = 0
    stop: int | None = None
    size: int = 0
    stamp: tuple[int, ...] = ()


def plan_pieces(
    inputs: Sequence[str | Path], fields: Fields, piece_bytes: int = PIECE_BYTES, *, own: Path | None = None
) -> list[Piece]:
    """Cut the inputs into pieces: files in sorted order, each once, then data sets as they were given.

    ``own`` is a folder that is none of the input, though it lies among it: what a process that was killed has left.

    Raises:
        ValueError: when an input matches no file (all such inputs at once), or a table cannot be opened or has no text.
    """
    names = [str(name) for name in inputs]
    datasets = [_dataset_name(name) for name in names if _is_dataset(name)]
    matches = {name: _without(own, _files(name)) for name in names if not _is_dataset(name)}
    unmatched = [name for name, files in matches.items() if not files]
    if unmatched or not names:
        raise ValueError(f"input {', '.join(unmatched) or '(none)'}: matches no file.")
    files = sorted({file for found in matches.values() for file in found})
    pieces = list(_pieces_of_files(files, fields, piece_bytes))
    for name in datasets:
        pieces += _pieces_of_dataset(name, fields)
    return pieces


def _is_dataset(name: str) -> bool:
    return name.startswith(DATASET_PREFIX) or is_saved_dataset(Path(name))


def _dataset_name(name: str) -> str:
    return name if name.startswith(DATASET_PREFIX) else DATASET_PREFIX + name


def _files(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_file():
        return [path]  # a name may hold characters that mean something in a pattern
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
    return [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]


def _without(own: Path | None, files: list[Path]) -> list[Path]:
    if own is None or not own.exists():
        return files
    return [file for file in files if own.resolve() not in file.resolve().parents]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _pieces_of_files(files: Iterable[Path], fields: Fields, piece_bytes: int) -> Iterator[Piece]:
    for kind, group in itertools.groupby(files, key=_kind):
        if kind == "text":
            yield from _pieces_of_texts(group, piece_bytes)
        for file in group if kind != "text" else ():
            yield from (
                _pieces_of_lines(file, piece_bytes)
                if kind == "lines"
                else _pieces_of_parquet(file, fields, piece_bytes)
            )


def _kind(file: Path) -> str:
    if file.suffix == ".parquet":
        return "parquet"
    return "lines" if plain_suffix(file) in LINES_SUFFIXES else "text"


def _pieces_of_texts(files: Iterable[Path], piece_bytes: int) -> Iterator[Piece]:
    """Small files share a piece."""
    together: list[Path] = []
    size = 0
    for file in files:
        together.append(file)
        size += file.stat().st_size
        if size >= piece_bytes:
            yield _piece("text", together)
            together, size = [], 0
    if together:
        yield _piece("text", together)


def _pieces_of_lines(file: Path, piece_bytes: int) -> Iterator[Piece]:
    size = file.stat().st_size
    if is_compressed(file):  # nobody knows where a line begins in it
        yield _piece("lines", [file])
    else:
        for start in range(0, size, piece_bytes):
            stop = min(start + piece_bytes, size)
            yield _piece("lines", [file], start, stop, stop - start)


def _pieces_of_parquet(file: Path, fields: Fields, piece_bytes: int) -> Iterator[Piece]:
    sizes = row_group_bytes(file, fields)
    scale = file.stat().st_size / max(1, sum(sizes))  # to bytes on disk
    start = together = 0
    for stop, size in enumerate(sizes, start=1):
        together += size
        if together >= piece_bytes or stop == len(sizes):
            yield _piece("parquet", [file], start, stop, round(together * scale))
            start, together = stop, 0


def _pieces_of_dataset(name: str, fields: Fields) -> Iterator[Piece]:
    rows, size, stamp = dataset_size(name, fields)
    for start in range(0, rows, DATASET_ROWS):
        stop = min(start + DATASET_ROWS, rows)
        yield Piece("dataset", (name,), start, stop, size * (stop - start) // rows, (stamp,))


def _piece(
    kind: Kind, files: Sequence[Path], start: int = 0, stop: int | None = None, size: int | None = None
) -> Piece:
    status = [file.stat() for file in files]
    stamp = tuple(number for one in status for number in (one.st_size, one.st_mtime_ns))
    size = sum(one.st_size for one in status) if size is None else size
    return Piece(kind, tuple(map(str, files)), start, stop, size, stamp)
