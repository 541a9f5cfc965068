"""Stages of a schedule written the way people say them: ``1024 for 7200 steps then 2048``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

UNITS = ("steps", "samples", "tokens")
_MULTIPLES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
# Decimal multiples, as in papers: 375M tokens is 375 * 10^6, not 375 * 2^20. A lower-case m would read as milli.
_COUNT = re.compile(r"(?P<number>\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?) ?(?P<suffix>[kKMBGT]?)")
#: A count within a longer text.
WORD = r"\S+(?: [kKMBGT])?"
_STAGE = re.compile(rf"(?P<value>{WORD})(?:\s+for\s+(?P<length>{WORD})\s+(?P<unit>\w+))?")

Count = int | str
"""As a recipe has it, of steps, samples or tokens; the unit belongs to the field that holds it."""


class StageLength(NamedTuple):
    """A value and how long it holds; ``length`` is None in the last stage, which never ends."""

    value: int
    length: int | None = None
    unit: str = "steps"


def parse_count(text: Count) -> int:
    """A whole number >= 0 from ``7200``, ``6_000_000``, ``1.5k``, ``3e8`` or ``50 B``; k, M, B (or G), T are decimal.

    Raises:
        ValueError: when it is no such number, or is not whole.

    Example::

        >>> parse_count("6_000_000"), parse_count("1.5k"), parse_count("375 M"), parse_count(7)
        (6000000, 1500, 375000000, 7)
    """
    match = _COUNT.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r}: must be a whole number >= 0 with an optional k, M, B or T, as in 6M.")
    # Decimal, because 1.001 * 10**9 in binary floating point is not a whole number.
    count = Decimal(match["number"].replace("_", "")) * _MULTIPLES[match["suffix"]]
    if count != int(count):
        raise ValueError(f"{text!r}: must be a whole number, not {count.normalize():f}.")
    return int(count)


def parse_stages(text: str) -> list[StageLength]:
    """Read ``VALUE for LENGTH steps|samples|tokens then ... then VALUE``; the last stage may have a length too.

    Raises:
        ValueError: when a part of the text is no stage, or one before the last has no length.

    Example::

        >>> parse_stages("1024 for 7200 steps then 2048")
        [StageLength(value=1024, length=7200, unit='steps'), StageLength(value=2048, length=None, unit='steps')]
    """
    parts = re.split(r"\s+then\s+", text.strip())
    stages = []
    for part in parts:
        match = _STAGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r}: must read VALUE for LENGTH steps|samples|tokens, as 1024 for 7200 steps.")
        stages.append(_stage(match["value"], match["length"], match["unit"]))
    return _endless_last(stages)


def stages_from_list(name: str, entries: Sequence[Mapping[str, int | str]]) -> list[StageLength]:
    """Read ``[{name: 1024, steps: 7200}, {name: 2048}]``; ``name`` is the key that holds the value.

    Raises:
        ValueError: when an entry has other keys, more than one length, or none before the last.
    """
    stages = []
    for entry in entries:
        units = [key for key in entry if key in UNITS]
        if name not in entry or len(entry) != 1 + len(units) or len(units) > 1:
            raise ValueError(f"{dict(entry)}: must have the key {name} and at most one of {', '.join(UNITS)}.")
        unit = units[0] if units else None
        stages.append(_stage(entry[name], entry[unit] if unit else None, unit))
    if not stages:
        raise ValueError("no stages: give at least one.")
    return _endless_last(stages)


def _stage(value: int | str, length: int | str | None, unit: str | None) -> StageLength:
    if unit is None or length is None:
        return StageLength(_positive(value))
    if unit not in UNITS:
        raise ValueError(f"{unit!r}: must be one of {', '.join(UNITS)}.")
    return StageLength(_positive(value), _positive(length), unit)


def _positive(text: int | str) -> int:
    count = parse_count(text)
    if count < 1:
        raise ValueError(f"{text!r}: must be at least 1.")
    return count


def _endless_last(stages: list[StageLength]) -> list[StageLength]:
    for stage in stages[:-1]:
        if stage.length is None:
            raise ValueError(f"stage {stage.value}: has no length and another one follows; say how long it lasts.")
    return stages
