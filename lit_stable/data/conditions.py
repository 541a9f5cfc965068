"""Choose documents by what is known of them: ``score >= 0.5``, ``date < 2022-07-01``, ``top 0.3 by score``.

A condition is first settled against all documents, since the best 30 % are known only then, and then judges any
stretch of them. A document without the value that a condition speaks of is never chosen.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_stable.data.columns import Column
from lit_stable.data.text.documents import parse_date

Mask = npt.NDArray[np.bool_]
Values = Callable[[str], Column]
"""The values of a key over some stretch of documents."""
Stretches = Callable[[], Iterable[Values]]
"""All documents, stretch by stretch, as often as asked for."""

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARISON = re.compile(r"(?P<key>[\w.\-]+)\s*(?P<operator>>=|<=|==|!=|>|<)\s*(?P<value>.+)")
_TOP = re.compile(r"top\s+(?P<share>[\d.]+)\s+by\s+(?P<key>[\w.\-]+)")
_DIGIT_BITS, _DIGITS = 16, 4  # of a float64, from the most significant on


@dataclass(frozen=True)
class _Term:
    key: str
    symbol: str
    value: str

    def __str__(self) -> str:
        return f"top {self.value} by {self.key}" if self.symbol == "top" else f"{self.key} {self.symbol} {self.value}"


class DocumentFilter:
    """A condition on documents, or several joined by ``and``.

    Args:
        text: ``KEY OPERATOR VALUE``, the operator one of >= <= == != > <, the value a number, a date or a text; or
            ``top SHARE by KEY``: the documents with the highest values, so that at least that share of those with a
            value is chosen, all of equal value together.

    Raises:
        ValueError: when the text is no such condition.

    Example::

        >>> DocumentFilter("score >= 0.5 and top 0.3 by rank").keys
        ['score', 'rank']
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._terms = [_parse(part) for part in re.split(r"\s+and(?:\s+|$)", text.strip())]
        self.keys = list(dict.fromkeys(term.key for term in self._terms))

    def settle(self, stretches: Stretches) -> SettledFilter:
        """Fix what depends on all documents.

        Raises:
            ValueError: when a condition compares a text with a number, or asks for the best of texts or of nothing.
        """
        return SettledFilter([_settled(term, stretches) for term in self._terms])


class SettledFilter:
    """A filter that no longer depends on any other documents than the judged ones."""

    def __init__(self, terms: list[tuple[str, str, float | str]]) -> None:
        self._terms = terms

    def mask(self, values: Values, count: int) -> Mask:
        """Which of ``count`` documents are chosen, (count,)."""
        chosen = np.ones(count, dtype=bool)
        for key, symbol, value in self._terms:
            chosen &= _compare(values(key), symbol, value)
        return chosen


def filter_problem(text: str) -> str | None:
    """What is wrong with the text of a filter, or None."""
    try:
        DocumentFilter(text)
    except ValueError as error:
        return str(error)
    return None


def _parse(part: str) -> _Term:
    if match := _TOP.fullmatch(part):
        try:
            share = float(match["share"])
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ValueError(f"filter={part}: the share must be above 0 and at most 1, as top 0.3 by score.")
        return _Term(match["key"], "top", match["share"])
    match = _COMPARISON.fullmatch(part)
    if match is None:
        raise ValueError(f"filter={part}: must read KEY >= VALUE (or <=, ==, !=, >, <) or top SHARE by KEY.")
    if match["key"] == "date" and not _is_date(match["value"]):
        raise ValueError(f"filter={part}: the value must be a date, YYYY-MM-DD.")
    return _Term(match["key"], match["operator"], match["value"].strip())


def _is_date(value: str) -> bool:
    try:
        return parse_date(value.strip()) > 0
    except ValueError:
        return False


def _settled(term: _Term, stretches: Stretches) -> tuple[str, str, float | str]:
    if term.symbol == "top":
        threshold = _threshold_of_the_best(term, lambda: (_numbers(term, values(term.key)) for values in stretches()))
        return term.key, ">=", threshold
    is_text = any(values(term.key).texts is not None for values in itertools.islice(stretches(), 1))
    if is_text and term.symbol not in ("==", "!="):
        raise ValueError(f"filter={term}: {term.key} is a text; texts are compared by == and !=.")
    if is_text:
        return term.key, term.symbol, term.value.strip("'\"")
    try:
        return term.key, term.symbol, float(parse_date(term.value) if term.key == "date" else term.value)
    except ValueError as error:
        raise ValueError(f"filter={term}: {term.key} is a number, and {term.value} is none.") from error


def _numbers(term: _Term, column: Column) -> npt.NDArray[np.float64]:
    if column.texts is not None:
        raise ValueError(f"filter={term}: {term.key} is a text, and texts have no order.")
    return np.asarray(column.data[column.known], dtype=np.float64)


def _threshold_of_the_best(term: _Term, numbers: Callable[[], Iterable[npt.NDArray[np.float64]]]) -> float:
    count = sum(len(part) for part in numbers())
    if count == 0:
        raise ValueError(f"filter={term}: no document has a value for {term.key}.")
    return nth_largest(numbers, math.ceil(Fraction(term.value) * count))


def nth_largest(numbers: Callable[[], Iterable[npt.NDArray[np.float64]]], rank: int) -> float:
    """The number of that rank, counted from 1 for the largest, in four passes and constant memory.

    A radix selection on the bits of the numbers, which sort as the numbers do once the sign is taken care of.
    """
    prefix = 0
    for digit in range(_DIGITS):
        shift = _DIGIT_BITS * (_DIGITS - 1 - digit)
        counts = np.zeros(1 << _DIGIT_BITS, dtype=np.int64)
        for part in numbers():
            keys = _sortable(part)
            inside = keys[keys >> np.uint64(shift + _DIGIT_BITS) == np.uint64(prefix)] if digit else keys
            digits = (inside >> np.uint64(shift)) & np.uint64((1 << _DIGIT_BITS) - 1)
            counts += np.bincount(digits.astype(np.int64), minlength=len(counts))
        above = np.cumsum(counts[::-1])[::-1]  # how many have this digit or a higher one
        chosen = int(np.flatnonzero(above >= rank)[-1])
        rank -= int(above[chosen] - counts[chosen])
        prefix = prefix << _DIGIT_BITS | chosen
    bits = prefix ^ (1 << 63) if prefix >> 63 else prefix ^ ((1 << 64) - 1)
    return float(np.array(bits, dtype=np.uint64).view(np.float64))


def _sortable(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.uint64]:
    bits = (np.ascontiguousarray(numbers) + 0.0).view(np.uint64)  # + 0.0: there is one zero, not two
    negative = bits >> np.uint64(63) == 1
    return np.where(negative, ~bits, bits | np.uint64(1 << 63))


def _compare(column: Column, symbol: str, value: float | str) -> Mask:
    compare = _OPERATORS[symbol]
    if column.texts is None:
        return np.asarray(compare(column.data, value)) & column.known
    code = column.texts.index(str(value)) if value in column.texts else len(column.texts)
    return np.asarray(compare(column.data, code)) & column.known
