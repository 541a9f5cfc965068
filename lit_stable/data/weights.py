"""How many samples of each source stand in each block of the sample stream: constant, or a function of the position.

Constant weights cut the stream into blocks of 65 536 positions with the same exact numbers. A schedule cuts it at its
marks, and finer where weights change along a line; the numbers of a block are those that bring the sums over all blocks
nearest to the integral of the weights, so that no rounding adds up. Behind the last mark weights, and with them the
numbers of a block, are constant again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.stages import parse_count
from lit_stable.data.order import Indices

BLOCK = 65_536
SMALLEST_STEP, STEPS = 1024, 64  # of a line: constant over at least so many positions, in about so many steps


class Blocks(Protocol):
    """The stream cut into numbered blocks."""

    def number(self, positions: Indices) -> Indices:
        """Block of each position, (N,)."""

    def start(self, block: int) -> int:
        """First position of a block."""

    def quotas(self, block: int) -> Indices:
        """Samples of each source in a block, (S,)."""

    def before(self, block: int) -> Indices:
        """Samples of each source before a block, (S,)."""


class ConstantBlocks:
    """Blocks of 65 536 positions with the same quotas.

    Args:
        quotas: Samples of each source per block, (S,).
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = np.array(quotas, dtype=np.int64)

    def number(self, positions: Indices) -> Indices:
        blocks: Indices = positions // BLOCK
        return blocks

    def start(self, block: int) -> int:
        return block * BLOCK

    def quotas(self, block: int) -> Indices:
        return self._quotas

    def before(self, block: int) -> Indices:
        sums: Indices = block * self._quotas
        return sums


@judges_arguments(ValueError, "data.weight_schedule")
@dataclass(frozen=True)
class WeightSchedule:
    """Weights of the sources as a function of the position in the sample stream.

    Args:
        marks: Weights by source at a number of samples, as ``{0: {web: 9, books: 1}, 40M: {web: 1, books: 1}}``; the
            first mark is 0, every source that is named anywhere has a weight at each mark.
        shape: ``stages``: weights hold from their mark on; ``linear``: shares change along a line between marks. Both
            stay as they are behind the last.
        unit: Of the marks: ``samples`` of the stream, or ``tokens``: samples of full length.
    """

    marks: dict[str, dict[str, float]] = field(default_factory=dict)
    shape: Literal["stages", "linear"] = "stages"
    unit: Literal["samples", "tokens"] = "samples"

    def problems(self, sources: Sequence[str]) -> list[str]:
        """What is wrong with the schedule for these sources."""
        positions: list[int] = []
        problems: list[str] = []
        for mark, weights in self.marks.items():
            where = f"data.weight_schedule.marks.{mark}"
            try:
                positions.append(parse_count(mark))
            except ValueError as error:
                problems.append(f"{where}: {error}")
            if weights.keys() != set(sources):
                named, wanted = ", ".join(weights) or "none", ", ".join(sources)
                problems.append(f"{where}: names {named}; must give a weight to each of {wanted}.")
            elif not all(math.isfinite(w) and w >= 0 for w in weights.values()) or not any(weights.values()):
                problems.append(f"{where}: weights must be finite, at least 0, and not all 0.")
        if not problems and (not positions or positions[0] != 0 or any(b <= a for a, b in pairwise(positions))):
            problems.append("data.weight_schedule.marks: must begin at 0 and ascend.")
        return problems

    def blocks(self, sources: Sequence[str], tokens_per_sample: int) -> ScheduledBlocks:
        """The blocks of a stream of those sources."""
        unit = tokens_per_sample if self.unit == "tokens" else 1
        positions = [math.ceil(Fraction(parse_count(mark), unit)) for mark in self.marks]
        shares = [_shares([weights[name] for name in sources]) for weights in self.marks.values()]
        return ScheduledBlocks(positions, shares, self.shape == "linear")


class ScheduledBlocks:
    """Blocks whose quotas follow shares between marks.

    Memory is 8 bytes per source and block, and blocks are many only where shares change along a line over billions of
    samples: 15,000 of them in 10^9.

    Args:
        positions: Of the marks, ascending from 0.
        shares: Of each source at each mark, summing to 1.
        linear: Whether shares change along a line between marks, or in stages at marks.
    """

    def __init__(self, positions: Sequence[int], shares: Sequence[Sequence[Fraction]], linear: bool) -> None:
        edges, sums = [0], [[0] * len(shares[0])]
        exact = [Fraction(0)] * len(shares[0])  # the integral of the shares up to the last edge
        for (begin, end), (old, new) in zip(pairwise(positions), pairwise(shares), strict=True):
            for start, stop in pairwise(_cuts(begin, end, linear and list(old) != list(new))):
                middle = Fraction(start + stop - 2 * begin, 2 * max(1, end - begin)) if linear else Fraction(0)
                exact = [e + (stop - start) * (a + (b - a) * middle) for e, a, b in zip(exact, old, new, strict=True)]
                sums.append(_nearest(exact, sums[-1], stop - start))
                edges.append(stop)
        self._edges = np.array(edges, dtype=np.int64)  # (K + 1,)
        self._sums = np.array(sums, dtype=np.int64)  # (K + 1, S)
        self._last = np.array(quotas(shares[-1]), dtype=np.int64)

    def number(self, positions: Indices) -> Indices:
        last = len(self._edges) - 1
        early = np.searchsorted(self._edges, positions, side="right") - 1
        blocks: Indices = np.where(early < last, early, last + (positions - self._edges[-1]) // BLOCK)
        return blocks

    def start(self, block: int) -> int:
        behind = max(0, block - (len(self._edges) - 1))
        return int(self._edges[block - behind]) + behind * BLOCK

    def quotas(self, block: int) -> Indices:
        if block >= len(self._edges) - 1:
            return self._last
        quotas: Indices = self._sums[block + 1] - self._sums[block]
        return quotas

    def before(self, block: int) -> Indices:
        behind = max(0, block - (len(self._edges) - 1))
        sums: Indices = self._sums[block - behind] + behind * self._last
        return sums


def quotas(weights: Sequence[float | Fraction]) -> list[int]:
    """Samples of each source per block: ``weights`` scaled to sum to 65 536 by largest remainder.

    A positive weight never rounds to nothing: it gets at least 1, taken from the largest quota. Weight 0 gets 0.

    Raises:
        ValueError: when a weight is negative or not finite, all are 0, or there are more sources than places.
    """
    if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
        raise ValueError(f"weights={list(weights)}: must be finite, at least 0, and not all 0.")
    if sum(weight > 0 for weight in weights) > BLOCK:
        raise ValueError(f"{len(weights)} weighted sources: at most {BLOCK} fit in a block; merge some.")
    result = largest_remainder([share * BLOCK for share in _shares(weights)], BLOCK)
    for source, weight in enumerate(weights):
        if weight > 0 and result[source] == 0:
            result[result.index(max(result))] -= 1
            result[source] = 1
    return result


def largest_remainder(wanted: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers that sum to ``total`` and lie next to the ``wanted`` ones, which do so too; equal ones in order."""
    result = [math.floor(number) for number in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda source: (result[source] - wanted[source], source))
    for source in by_remainder[: total - sum(result)]:
        result[source] += 1
    return result


def _nearest(exact: Sequence[Fraction], before: Sequence[int], size: int) -> list[int]:
    """Sums behind a block of ``size``: next to the ``exact`` ones, and for no source below those ``before`` it."""
    missing = [max(Fraction(0), e - b) for e, b in zip(exact, before, strict=True)]
    total = sum(missing)
    counts = largest_remainder([m * size / total for m in missing], size)
    return [b + count for b, count in zip(before, counts, strict=True)]


def _shares(weights: Sequence[float | Fraction]) -> list[Fraction]:
    # Fractions keep the rounding exact, hence equal on all machines.
    total = sum(Fraction(weight) for weight in weights)
    return [Fraction(weight) / total for weight in weights]


def _cuts(begin: int, end: int, changing: bool) -> list[int]:
    step = min(BLOCK, max(SMALLEST_STEP, (end - begin) // STEPS)) if changing else BLOCK
    return [*range(begin, end, step), end] if end > begin else [begin]
