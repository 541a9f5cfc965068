"""Read documents from text and JSONL files, and check every line before any of them is used."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Document(NamedTuple):
    """One text, the name of the source it came from, and its date as yyyymmdd (0: unknown)."""

    text: str
    source: str
    date: int = 0


class TextFiles:
    """The documents of a list of files, iterated as often as needed, in sorted file order.

    A ``.jsonl`` file holds one document per line: ``text``, optionally ``source`` and ``date`` (yyyymmdd or
    YYYY-MM-DD...). Any other file is UTF-8 text: one document, or several when a separator is given.

    Args:
        inputs: Paths and glob patterns (``**`` descends into folders).
        source: Name for documents that name no source of their own.
        separator: Text that stands between the documents of a text file; None: a file is a document.

    Raises:
        ValueError: when an input matches no file (all such inputs at once); while iterating, when a file is not UTF-8,
            or, after the last document, when lines were bad: their number and the first with file and line.
    """

    def __init__(self, inputs: Sequence[str | Path], source: str, separator: str | None = None) -> None:
        matches = {str(pattern): _files(str(pattern)) for pattern in inputs}
        unmatched = [pattern for pattern, files in matches.items() if not files]
        if unmatched or not matches:
            raise ValueError(f"input {', '.join(unmatched) or '(none)'}: matches no file.")
        self.files = sorted({file for files in matches.values() for file in files})
        self._source = source
        self._separator = separator

    def __iter__(self) -> Iterator[Document]:
        bad: list[str] = []
        for file in self.files:
            yield from self._lines(file, bad) if file.suffix == ".jsonl" else self._texts(file)
        if bad:
            raise ValueError(f"{bad[0]} ({len(bad)} bad {'line' if len(bad) == 1 else 'lines'} in all); correct them.")

    def _texts(self, file: Path) -> Iterator[Document]:
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start}).") from error
        for part in [text] if self._separator is None else text.split(self._separator):
            yield Document(part, self._source)

    def _lines(self, file: Path, bad: list[str]) -> Iterator[Document]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                try:
                    yield _parse(line, self._source)
                except ValueError as error:
                    # Only the first is shown, but all are counted: one typo and a wrong format call for other cures.
                    bad.append(f"{file}:{number}: {error}")


def _files(pattern: str) -> list[Path]:
    if Path(pattern).is_file():
        return [Path(pattern)]  # a name may hold characters that mean something in a pattern
    return [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]


def _parse(line: bytes, default_source: str) -> Document:
    record = json.loads(line)  # UnicodeDecodeError and JSONDecodeError are ValueErrors
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError('must be a JSON object with a string "text"')
    try:
        record["text"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError('"text" holds half of a surrogate pair, which is no text') from error
    source = record.get("source", default_source)
    if not isinstance(source, str):
        raise ValueError(f"source={source!r} must be a string")
    return Document(record["text"], source, _parse_date(record.get("date", 0)))


def _parse_date(value: object) -> int:
    if value == 0:
        return 0
    match = re.match(r"(\d{4})-?(\d{2})-?(\d{2})(?!\d)", str(value))
    if match is None or not (1 <= int(match[2]) <= 12 and 1 <= int(match[3]) <= 31):
        raise ValueError(f"date={value!r} must be YYYY-MM-DD or yyyymmdd")
    return int(match[1] + match[2] + match[3])
