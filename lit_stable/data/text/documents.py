"""One document: its text, source, date and kept values, and the check of the record that it was read from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Value = float | str | None
EXACT_IN_A_FLOAT = 2**53


class Place(NamedTuple):
    """Where a document stands, for messages: a whole file, a line of one, or a row of a table, counted from 0.

    Lines are counted from 1 at the byte ``start``, where a part of a large file begins.
    """

    file: str
    form: Literal["file", "line", "row"] = "file"
    number: int = 0
    start: int = 0


class Document(NamedTuple):
    """One text, the name of the source it came from, its date as yyyymmdd (0: unknown), and the values of kept keys."""

    text: str
    source: str
    date: int = 0
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Fields:
    """Which fields of a record are read.

    Args:
        source: Name for documents that name no source of their own.
        separator: Text that stands between the documents of a text file; None: a file is a document.
        text_key: Key of the text.
        date_key: Key of the date.
        keep: Keys whose values are kept, numbers or texts; ``a.b`` is the key b inside a.
    """

    source: str
    separator: str | None = None
    text_key: str = "text"
    date_key: str = "date"
    keep: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that may be read."""
        return (self.text_key, "source", self.date_key, *self.keep)


def document_of(record: object, fields: Fields) -> Document:
    """The document that a record holds.

    Raises:
        ValueError: with what is wrong with the record, to stand behind its place.
    """
    text = record.get(fields.text_key) if isinstance(record, Mapping) else None
    if not isinstance(record, Mapping) or not isinstance(text, str):
        raise ValueError(f'must be an object with a string "{fields.text_key}"')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f'"{fields.text_key}" holds half of a surrogate pair, which is no text') from error
    source = record.get("source")
    if not isinstance(source, str | None):
        raise ValueError(f"source={source!r} must be a string")
    values = tuple(_value(record, key) for key in fields.keep)
    return Document(text, fields.source if source is None else source, parse_date(record.get(fields.date_key)), values)


def parse_date(value: object) -> int:
    """yyyymmdd as an int, from that or from any text that begins with YYYY-MM-DD; None and 0 are no date.

    Raises:
        ValueError: when it is no such date.

    Example::

        >>> parse_date("2024-02-29T12:00:00Z"), parse_date(19991231), parse_date(None)
        (20240229, 19991231, 0)
    """
    if value is None or value == 0:
        return 0
    match = re.match(r"(\d{4})-?(\d{2})-?(\d{2})(?!\d)", str(value))
    if match is None or not (1 <= int(match[2]) <= 12 and 1 <= int(match[3]) <= 31):
        raise ValueError(f"date={value!r} must be YYYY-MM-DD or yyyymmdd")
    return int(match[1] + match[2] + match[3])


def _value(record: Mapping[str, Any], key: str) -> Value:
    found: Any = record.get(key)
    if found is None and "." in key:  # a flat key may hold a dot
        found = record
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    if found is None or isinstance(found, str):
        return found
    if not isinstance(found, bool | int | float):
        raise ValueError(f"{key}={found!r} must be a number or a text to be kept")
    if isinstance(found, int) and abs(found) > EXACT_IN_A_FLOAT:
        raise ValueError(f"{key}={found} must be at most 2^53 to be kept exactly")
    return float(found) if found == found else None  # NaN is how a missing number is stored
