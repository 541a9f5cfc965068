"""From a piece of the input to its documents, from any point of it on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lit_stable.data.text.compressed import Bytes, open_bytes
from lit_stable.data.text.documents import Document, Fields, Place, document_of
from lit_stable.data.text.inputs import Piece
from lit_stable.data.text.tables import dataset_rows, parquet_rows

Cursor = tuple[int, int, int]
"""A point between two documents: number of the file, offset in its content, documents or lines before it; of lines, in
place of the number, where the first line of the piece begins."""
START: Cursor = (0, 0, 0)
_BLOCK = 1 << 20


class Row(NamedTuple):
    """A document or what is wrong with it."""

    place: Place
    document: Document | None
    problem: str


class Step(NamedTuple):
    """One row, the point behind it, and the bytes on disk read of the piece so far (0: not known)."""

    row: Row
    cursor: Cursor
    raw: int


def read_piece(piece: Piece, fields: Fields, cursor: Cursor = START) -> Iterator[Step]:
    """The documents of ``piece`` behind ``cursor``, bad ones among them.

    Raises:
        ValueError: when a file as a whole cannot be read.
    """
    if piece.kind == "lines":
        return _lines(piece, fields, cursor)
    if piece.kind == "text":
        return _texts(piece, fields, cursor)
    return _rows(piece, fields, cursor)


def describe(place: Place, lines_before: int | None = None) -> str:
    """``file``, ``file:line`` or ``file[row]``.

    Args:
        place: What to name.
        lines_before: Lines of the file before ``place.start``; None: the file is read to count them.
    """
    if place.form == "file":
        return place.file
    if place.form == "row":
        return f"{place.file}[{place.number}]"
    before = _count_lines(Path(place.file), place.start) if lines_before is None else lines_before
    return f"{place.file}:{before + place.number}"


def _count_lines(path: Path, stop: int) -> int:
    count = 0
    with path.open("rb") as file:
        while block := file.read(min(_BLOCK, stop)):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def _row(place: Place, parse: Callable[[Any, Fields], Document], given: Any, fields: Fields) -> Row:
    try:
        return Row(place, parse(given, fields), "")
    except ValueError as error:
        return Row(place, None, str(error))


def _lines(piece: Piece, fields: Fields, cursor: Cursor) -> Iterator[Step]:
    """Lines that begin in [start, stop) of the file: one that is cut by a piece's edge belongs to the piece before."""
    file = piece.files[0]
    with open_bytes(Path(file)) as content:
        first = _line_start(content, piece.start)
        _, offset, number = cursor if cursor != START else (first, first, 0)
        if cursor != START:
            content.skip(offset)
        while piece.stop is None or offset < piece.stop:
            line = content.stream.readline()
            if not line:
                return
            offset, number = offset + len(line), number + 1
            if not line.isspace():
                row = _row(Place(file, "line", number, first), _document_of_line, line, fields)
                raw = content.raw.tell() if piece.stop is None else offset - piece.start
                yield Step(row, (first, offset, number), raw)


def _line_start(content: Bytes, offset: int) -> int:
    """Where the first line begins that does so at ``offset`` or behind it; the stream then stands there."""
    if offset == 0:
        return 0
    content.skip(offset - 1)
    return offset - 1 + len(content.stream.readline())


def _document_of_line(line: bytes, fields: Fields) -> Document:
    try:
        found = json.loads(line)  # UnicodeDecodeError and JSONDecodeError are ValueErrors
    except RecursionError as error:
        raise ValueError("is nested too deeply for a JSON reader") from error
    return document_of(found, fields)


def _texts(piece: Piece, fields: Fields, cursor: Cursor) -> Iterator[Step]:
    before = 0
    for index, file in enumerate(piece.files):
        if index >= cursor[0]:
            with open_bytes(Path(file)) as content:
                _, start, number = cursor if index == cursor[0] else START
                content.skip(start)
                for text, offset in _documents_in(content.stream, fields.separator, start):
                    place = Place(file) if fields.separator is None else Place(file, "row", number)
                    number += 1
                    point = (index + 1, 0, 0) if offset is None else (index, offset, number)
                    yield Step(_row(place, _document_of_text, text, fields), point, before + content.raw.tell())
        before += Path(file).stat().st_size


def _documents_in(stream: BinaryIO, separator: str | None, offset: int) -> Iterator[tuple[bytes, int | None]]:
    """Each document and the offset behind its separator, None for the last: what ``bytes.split`` gives, in one pass."""
    if separator is None:
        yield stream.read(), None
        return
    mark = separator.encode("utf-8")
    rest, searched = bytearray(), 0
    while block := stream.read(_BLOCK):
        rest += block
        begin = 0
        while (found := rest.find(mark, max(begin, searched))) >= 0:
            offset += found + len(mark) - begin
            yield bytes(rest[begin:found]), offset
            begin = searched = found + len(mark)
        del rest[:begin]
        searched = max(0, len(rest) - len(mark) + 1)
    yield bytes(rest), None


def _document_of_text(text: bytes, fields: Fields) -> Document:
    try:
        return Document(text.decode("utf-8"), fields.source, values=(None,) * len(fields.keep))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _rows(piece: Piece, fields: Fields, cursor: Cursor) -> Iterator[Step]:
    records: Iterator[tuple[int, dict[str, Any]]]
    if piece.kind == "parquet":
        records = parquet_rows(Path(piece.files[0]), piece.start, piece.stop, fields)
    else:
        records = dataset_rows(piece.files[0], piece.start, piece.stop, fields)
    for done, (number, record) in enumerate(records, start=1):
        if done > cursor[2]:
            yield Step(_row(Place(piece.files[0], "row", number), document_of, record, fields), (0, 0, done), 0)
