"""From a piece of the input to its parts on disk, going on behind those that are there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lit_stable.data.text.artefacts import ArtefactLimits, measure
from lit_stable.data.text.documents import Document, Fields, Place
from lit_stable.data.text.inputs import PIECE_BYTES, Piece
from lit_stable.data.text.parts import BadRow, Part, PartWriter, finished_parts, part_path
from lit_stable.data.text.readers import START, Row, Step, describe, read_piece
from lit_stable.data.tokenizer import Tokenizer, load_tokenizer

PART_FORMAT = 1
BATCH_CHARACTERS = 2_000_000  # what is encoded at once, over all cores: bounds memory


class Advance(NamedTuple):
    """What was done since the last one: bytes of the input on disk, bytes of text, documents, tokens."""

    raw: int
    num_bytes: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class Tokenising:
    """How all pieces are turned into parts.

    Args:
        folder: Where parts go.
        tokenizer: The tokenizer's file.
        tokenizer_sha256: Its hash.
        fields: What is read of a record.
        limits: From where on a document is flagged as an artefact; None: nothing is measured.
        strict: Whether a document that cannot be read ends it all.
    """

    folder: Path
    tokenizer: Path
    tokenizer_sha256: str
    fields: Fields
    limits: ArtefactLimits | None
    strict: bool = False

    def key(self, piece: Piece) -> str:
        """The name of a piece's parts: another content or another way to make them has another one."""
        made_of = (PART_FORMAT, piece, self.tokenizer_sha256, self.fields, self.limits)
        return hashlib.sha256(repr(made_of).encode()).hexdigest()[:20]


class PieceWorker:
    """Turns pieces into parts, in one process.

    Args:
        how: The same for all pieces.
        part_bytes: Text after which a part is closed and another begun, so that little is lost of a large piece.
    """

    def __init__(self, how: Tokenising, part_bytes: int = PIECE_BYTES) -> None:
        self.how = how
        self.part_bytes = part_bytes
        self._tokenizer: Tokenizer | None = None

    def __call__(self, piece: Piece, advance: Callable[[Advance], None]) -> None:
        """Write what is missing of a piece; ``advance`` is told after every batch.

        Raises:
            ValueError: when a file cannot be read, or, if strict, at the first document that cannot.
        """
        key = self.how.key(piece)
        done = finished_parts(self.how.folder, key)
        cursor = START
        if done:
            summary = Part(done[-1], self.how.fields.keep).summary
            if summary.last:
                return
            cursor = summary.cursor
        file = piece.files[0] if piece.kind == "lines" else ""
        raw = self.write_parts(key, len(done), read_piece(piece, self.how.fields, cursor), advance, file)
        advance(Advance(max(0, piece.size - raw), 0, 0, 0))  # what the reader could not measure

    def write_parts(
        self, key: str, number: int, steps: Iterator[Step], advance: Callable[[Advance], None], file: str = ""
    ) -> int:
        """Write parts of that key, counted from ``number`` on, to the end of ``steps``; returns the bytes read."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.how.tokenizer)
        raw, ended = 0, False
        while not ended:
            path = part_path(self.how.folder, key, number)
            writer = PartWriter(path, self.how.fields.keep, self._tokenizer.vocab_size, self._tokenizer.eot_id, file)
            raw, ended = self._fill(writer, steps, raw, advance)
            number += 1
        return raw

    def _fill(
        self, writer: PartWriter, steps: Iterator[Step], raw: int, advance: Callable[[Advance], None]
    ) -> tuple[int, bool]:
        cursor, ended = START, False
        while not ended and writer.summary.num_bytes < self.part_bytes:
            batch, ended = _batch(steps)
            counted = self._write(writer, (step.row for step in batch))
            if batch:
                cursor, before, raw = batch[-1].cursor, raw, batch[-1].raw or raw
                advance(counted._replace(raw=raw - before))
        writer.finish(cursor, ended)
        return raw, ended

    def _write(self, writer: PartWriter, rows: Iterable[Row]) -> Advance:
        documents: list[tuple[Place, Document, bytes]] = []
        for place, document, problem in rows:
            if document is None:
                self._bad(writer, BadRow(place, problem))
            elif not document.text.strip():
                writer.summary.num_empty += 1
            else:
                documents.append((place, document, document.text.encode("utf-8")))
        assert self._tokenizer is not None
        encoded = self._tokenizer.encode_batch([document.text for _, document, _ in documents])
        for (place, document, content), ids in zip(documents, encoded, strict=True):
            artefact = None
            if self.how.limits is not None:
                measures = measure(content, ids)
                artefact = (place, measures) if self.how.limits.exceeded(measures) else None
            writer.add(document, ids, hashlib.sha256(content).digest(), artefact)
        num_bytes = sum(len(content) for _, _, content in documents)
        writer.summary.num_bytes += num_bytes
        return Advance(0, num_bytes, len(documents), sum(ids.size + 1 for ids in encoded))

    def _bad(self, writer: PartWriter, row: BadRow) -> None:
        if self.how.strict:
            raise ValueError(f"{describe(row.place)}: {row.problem}; correct it, or leave out --strict to go past it.")
        writer.add_bad(row)


def _batch(steps: Iterator[Step]) -> tuple[list[Step], bool]:
    """The next rows with enough text to be worth encoding, and whether they are the last."""
    batch: list[Step] = []
    characters = 0
    for step in steps:
        batch.append(step)
        characters += len(step.row.document.text) if step.row.document is not None else 0
        if characters >= BATCH_CHARACTERS:
            return batch, False
    return batch, True
