"""How often something is done: every so many steps, samples or tokens, at the end of a window."""

from __future__ import annotations

import re
from typing import NamedTuple

from .progress import Mark
from .stages import UNITS, WORD, parse_count

_EVERY = re.compile(rf"\s*(?P<count>{WORD})(?:\s+(?P<unit>{'|'.join(UNITS)}))?\s*")

#: As a recipe has it: a number is one of optimizer steps; text may name another unit, as ``2M tokens``.
Every = int | str


class Cadence(NamedTuple):
    """A number and its unit: ``steps``, ``samples`` or ``tokens``."""

    number: int
    unit: str = "steps"

    def is_due(self, before: Mark, after: Mark) -> bool:
        """Whether the window between two counters has come to, or over, a multiple of the count.

        A function of the counters alone: whatever batches a ramp takes, and wherever a run is resumed, the same.
        """
        return bool(getattr(after, self.unit) // self.number > getattr(before, self.unit) // self.number)

    def __str__(self) -> str:
        return f"{self.number:,} {self.unit}"


_MOST = 1 << 62  # no run comes to it, and it is a number of 64 bits


def parse_cadence(every: Every) -> Cadence:
    """Read ``500``, ``1k steps``, ``2M tokens`` or ``100_000 samples``.

    Raises:
        ValueError: when it is none of these, or below 1; begins with the rule, behind which the remedy stands.

    Example::

        >>> parse_cadence("2M tokens"), parse_cadence(500)
        (Cadence(number=2000000, unit='tokens'), Cadence(number=500, unit='steps'))
    """
    match = _EVERY.fullmatch(str(every))
    try:
        cadence = Cadence(parse_count(match["count"]), match["unit"] or "steps") if match else None
    except ValueError:
        cadence = None
    if cadence is None:
        if str(every).lstrip().startswith("-"):
            raise ValueError("must be at least 1.")
        raise ValueError("must be a count of steps, samples or tokens, as 500 or 2M tokens.")
    if cadence.number < 1:
        raise ValueError("must be at least 1.")
    if cadence.number > _MOST:
        raise ValueError(f"must be at most {_MOST:,}.")
    return cadence
