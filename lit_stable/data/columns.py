"""One value per document, numbers or texts from a list: what is kept of documents beside their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NUMBER = np.dtype("<f8")
CODE = np.dtype("<i4")
MISSING_CODE = -1
MOST_TEXTS = 1 << 16


class Column(NamedTuple):
    """The values of one key, one per document.

    Args:
        data: float64 (N,), NaN where missing, or, when there are ``texts``, int32 (N,), -1 where missing.
        texts: What the codes mean; None: the column holds numbers.
    """

    data: npt.NDArray[Any]
    texts: list[str] | None = None

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which documents have a value, (N,)."""
        known: npt.NDArray[np.bool_] = ~np.isnan(self.data) if self.texts is None else self.data != MISSING_CODE
        return known

    def take(self, rows: npt.NDArray[Any] | slice) -> Column:
        """The values of some documents."""
        return Column(self.data[rows], self.texts)

    def value(self, row: int) -> float | str | None:
        """The value of one document."""
        if not self.known[row]:
            return None
        return float(self.data[row]) if self.texts is None else self.texts[int(self.data[row])]


def column_of(key: str, values: Sequence[float | str | None]) -> Column | None:
    """The column of some documents' values; None when none of them has any, and so no type shows.

    Raises:
        ValueError: when numbers and texts are mixed, or there are more than 65,536 different texts.
    """
    texts = list(dict.fromkeys(value for value in values if isinstance(value, str)))
    if texts and any(isinstance(value, float) for value in values):
        raise ValueError(f"keep={key}: is a number in some documents and a text in others, as {texts[0]!r}.")
    if not texts:
        data = np.array([np.nan if value is None else value for value in values], dtype=NUMBER)
        return None if np.isnan(data).all() else Column(data)
    _require_few(key, len(texts))
    codes: dict[float | str | None, int] = {text: code for code, text in enumerate(texts)}
    return Column(np.array([codes.get(value, MISSING_CODE) for value in values], dtype=CODE), texts)


class ColumnBuilder:
    """Join columns of one key into one, with codes in the order in which texts first appear.

    Args:
        key: Named in messages.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.texts: dict[str, int] | None = None
        self._started = False

    def add(self, column: Column) -> npt.NDArray[Any]:
        """The values of ``column`` with the codes of the whole.

        Raises:
            ValueError: when it holds texts and earlier ones numbers, or the other way round, or too many texts.
        """
        if self._started and (column.texts is None) != (self.texts is None):
            raise ValueError(f"keep={self.key}: is a number in some documents and a text in others.")
        self._started = True
        if column.texts is None:
            return column.data.astype(NUMBER)
        self.texts = {} if self.texts is None else self.texts
        used, firsts = np.unique(column.data, return_index=True)
        new_codes = np.full(len(column.texts) + 1, MISSING_CODE, dtype=CODE)  # the last for -1
        for code in used[np.argsort(firsts)].tolist():
            if code != MISSING_CODE:
                new_codes[code] = self.texts.setdefault(column.texts[code], len(self.texts))
        _require_few(self.key, len(self.texts))
        codes: npt.NDArray[Any] = new_codes[column.data]
        return codes


def _require_few(key: str, count: int) -> None:
    if count > MOST_TEXTS:
        raise ValueError(f"keep={key}: has more than {MOST_TEXTS:,} different texts; keep a number or a few classes.")
