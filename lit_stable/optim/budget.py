"""Lengths written the way people say them: ``375M`` tokens, ``1.5k`` steps."""

from __future__ import annotations

import re
from decimal import Decimal

Budget = int | str  # a count of steps, samples or tokens; the unit belongs to the field that holds it

# Decimal multiples, as in papers: 375M tokens is 375 * 10^6, not 375 * 2^20. A lower-case m would read as milli.
_MULTIPLES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(?P<number>\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?) ?(?P<suffix>[kKMBGT]?)")


def parse_budget(value: Budget) -> int:
    """Turn a budget into a count.

    Args:
        value: an integer >= 0, or text: a number with optional underscores, decimals and exponent, then one of
            k, K (10^3), M (10^6), B, G (10^9), T (10^12). The product must be a whole number.

    Raises:
        ValueError: when the text is no such number, is negative, or is not whole.

    Example::

        >>> parse_budget("375M"), parse_budget("1.5k"), parse_budget("126_953_125"), parse_budget(7)
        (375000000, 1500, 126953125, 7)
    """
    match = _NUMBER.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"budget {value!r}: must be a whole number >= 0 with an optional k, M, B, G or T, as in 375M.")
    # Decimal, because 1.001 * 10**9 in binary floating point is not a whole number.
    count = Decimal(match["number"].replace("_", "")) * _MULTIPLES[match["suffix"]]
    if count != int(count):
        raise ValueError(f"budget {value!r}: must be a whole number, not {count.normalize():f}.")
    return int(count)
