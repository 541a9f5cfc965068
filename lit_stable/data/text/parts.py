"""Tokenised stretches of the input on disk, each complete or absent: what a killed `prepare` need not do again.

``KEY-0000.tokens``   ids and end-of-text tokens, raw
``KEY-0000.npz``      one row per document: length, digest, source, date, flagged, kept values; and a JSON of the rest

The table is written last, so a part is there when its table is. KEY says what the part was made from and how.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_stable.data.columns import Column, column_of
from lit_stable.data.store import token_dtype
from lit_stable.data.text.artefacts import Measures
from lit_stable.data.text.documents import Document, Place
from lit_stable.data.text.readers import Cursor

DIGEST_BYTES = 16
BAD_SHOWN = 20  # of each part; all are counted


class BadRow(NamedTuple):
    """A document that could not be read, and why."""

    place: Place
    problem: str


class Artefact(NamedTuple):
    """A document that looks like the work of a broken pipeline: its row in the part, place, measures and beginning."""

    row: int
    place: Place
    measures: Measures
    begins: str


@dataclass
class PartSummary:
    """What a part says of itself beside its rows.

    Args:
        cursor: Where the piece goes on behind this part.
        file: Of a piece of lines: the file, so that lines can be counted over its pieces.
        last: Whether this part ends the piece.
        num_bytes: Of the texts, in UTF-8.
        num_empty: Documents of blanks, left out.
        num_bad: Documents that could not be read.
        bad: The first of those.
        artefacts: Documents that were flagged.
    """

    cursor: Cursor
    file: str = ""
    last: bool = False
    num_bytes: int = 0
    num_empty: int = 0
    num_bad: int = 0
    bad: list[BadRow] = field(default_factory=list)
    artefacts: list[Artefact] = field(default_factory=list)


class Part:
    """A finished part, read as often as needed.

    Args:
        path: Its table.
        keep: The kept keys.
    """

    def __init__(self, path: Path, keep: Sequence[str]) -> None:
        self.path = path
        with np.load(path) as table:
            self.lengths: npt.NDArray[np.int64] = table["lengths"]  # (N,) in tokens, end-of-text included
            self.digests: npt.NDArray[np.uint8] = table["digests"]  # (N, 16)
            self.dates: npt.NDArray[np.int32] = table["dates"]
            self.flagged: npt.NDArray[np.bool_] = table["flagged"]
            about = json.loads(str(table["about"]))
            self.sources = Column(table["sources"], about["sources"])
            self.kept: dict[str, Column | None] = {
                key: Column(table[f"kept-{number}"], about["texts"][number]) if f"kept-{number}" in table else None
                for number, key in enumerate(keep)
            }
        self.summary = PartSummary(
            **about["summary"]
            | {
                "cursor": tuple(about["summary"]["cursor"]),
                "bad": [BadRow(Place(*place), problem) for place, problem in about["summary"]["bad"]],
                "artefacts": [
                    Artefact(row, Place(*place), Measures(*measures), begins)
                    for row, place, measures, begins in about["summary"]["artefacts"]
                ],
            }
        )
        self.vocab_size: int = about["vocab_size"]

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def tokens(self) -> npt.NDArray[Any]:
        """All tokens, in the dtype of the vocabulary, mapped from the file."""
        dtype = token_dtype(self.vocab_size)
        if not self.num_documents:  # an empty file cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(self.path.with_suffix(".tokens"), dtype=dtype, mode="r")


class PartWriter:
    """Write one part; nothing is there under its name before ``finish``.

    Args:
        path: The table to come.
        keep: The kept keys.
        vocab_size: Decides the dtype of the tokens.
        eot_id: Written behind each document.
        file: See ``PartSummary``.
    """

    def __init__(self, path: Path, keep: Sequence[str], vocab_size: int, eot_id: int, file: str = "") -> None:
        self.path = path
        self.summary = PartSummary((0, 0, 0), file)
        self._keep = keep
        self._vocab_size, self._dtype = vocab_size, token_dtype(vocab_size)
        self._eot = np.array(eot_id, dtype=self._dtype).tobytes()
        self._tokens = _scratch(path.with_suffix(".tokens"))
        self._file = self._tokens.open("wb")
        self._documents: list[tuple[str, int, tuple[Any, ...]]] = []
        self._lengths: list[int] = []
        self._digests = bytearray()
        self._flagged: list[bool] = []

    def add(
        self, document: Document, ids: npt.NDArray[np.int64], digest: bytes, artefact: tuple[Place, Measures] | None
    ) -> None:
        """Append one document: its tokens, the first 16 bytes of a digest of its text, what was measured if flagged."""
        self._file.write(ids.astype(self._dtype).tobytes())
        self._file.write(self._eot)
        if artefact is not None:
            self.summary.artefacts.append(Artefact(len(self._lengths), *artefact, document.text[:60]))
        self._documents.append((document.source, document.date, document.values))
        self._lengths.append(ids.size + 1)
        self._digests += digest[:DIGEST_BYTES]
        self._flagged.append(artefact is not None)

    def add_bad(self, row: BadRow) -> None:
        """Count a document that could not be read."""
        self.summary.num_bad += 1
        if len(self.summary.bad) < BAD_SHOWN:
            self.summary.bad.append(row)

    def finish(self, cursor: Cursor, last: bool) -> None:
        """Put the part in its place: tokens first, then the table that vouches for them."""
        _to_disk(self._file)
        self._tokens.rename(self.path.with_suffix(".tokens"))
        self.summary.cursor, self.summary.last = cursor, last
        scratch = _scratch(self.path)
        with scratch.open("wb") as file:
            np.savez(file, allow_pickle=False, **self._arrays())
            _to_disk(file, close=False)
        scratch.rename(self.path)

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        sources = column_of("source", [source for source, _, _ in self._documents])
        kept = [column_of(key, [values[n] for _, _, values in self._documents]) for n, key in enumerate(self._keep)]
        about = {
            "sources": sources.texts if sources is not None else [],
            "texts": [column.texts if column is not None else None for column in kept],
            "vocab_size": self._vocab_size,
            "summary": asdict(self.summary),
        }
        return {
            "lengths": np.array(self._lengths, dtype=np.int64),
            "digests": np.frombuffer(self._digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            "dates": np.array([date for _, date, _ in self._documents], dtype=np.int32),
            "flagged": np.array(self._flagged, dtype=bool),
            "sources": sources.data if sources is not None else np.zeros(0, dtype=np.int32),
            "about": np.array(json.dumps(about)),
            **{f"kept-{number}": column.data for number, column in enumerate(kept) if column is not None},
        }


def finished_parts(folder: Path, key: str) -> list[Path]:
    """Tables of the parts of a piece that are complete and follow each other from the first."""
    found: list[Path] = []
    while (path := part_path(folder, key, len(found))).is_file():
        found.append(path)
    return found


def is_finished(folder: Path, key: str) -> bool:
    """Whether all parts of a piece are there."""
    found = finished_parts(folder, key)
    return bool(found) and Part(found[-1], ()).summary.last


def part_path(folder: Path, key: str, number: int) -> Path:
    """Where the table of a piece's part lies."""
    return folder / f"{key}-{number:04d}.npz"


def remove_scratch(folder: Path) -> None:
    """Delete what killed processes left half-written."""
    for path in folder.glob("*.writing-*"):
        path.unlink(missing_ok=True)


def remove_others(folder: Path, wanted: Iterable[str]) -> None:
    """Delete the parts of all pieces but the ``wanted`` ones: they were made from other inputs or in another way."""
    keys = set(wanted)
    for path in folder.glob("*-*.*"):
        if path.name.rsplit("-", 1)[0] not in keys:
            path.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    return path.with_name(f"{path.name}.writing-{os.getpid()}")


def _to_disk(file: Any, close: bool = True) -> None:
    file.flush()
    os.fsync(file.fileno())
    if close:
        file.close()
