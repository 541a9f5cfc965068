"""Where something changes in a run: the few rows of its trace that are worth reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from lit_stable.cli.trace import Row
from lit_stable.optim.schedule import format_lr

_JUMP = 0.01  # of the rate in one iteration
_AS_BEFORE = 4.0  # times what it moved in the one before: the decay of a short run moves as far at every iteration
_MANY = 24


def turning_points(rows: Sequence[Row]) -> str:
    """A table: iteration, samples, tokens, and what is so from the next iteration on."""
    found = sorted(_turning_points(rows))
    shown = found if len(found) <= _MANY else [*found[: _MANY - 1], found[-1]]
    lines = [f"  {rows[n].iteration:>11,}  {rows[n].samples:>15,}  {rows[n].tokens:>19,}  {what}" for n, what in shown]
    more = [f"  ({len(found) - len(shown)} more; --trace FILE has every iteration)"] if len(found) > len(shown) else []
    return "\n".join([f"turning points:\n  {'iteration':>11}  {'samples':>15}  {'tokens':>19}", *lines, *more])


def _turning_points(rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
    """(index of a row, what happens there)."""
    rates = [row.lr for row in rows]
    peak, last = rates.index(max(rates)), len(rows) - 1
    yield peak, f"the learning rate is at its highest, {format_lr(rates[peak])}"
    for name, what in (("batch", "batches have"), ("length", "sequences have")):
        values = [getattr(row, name) for row in rows]
        if values[0] != values[-1]:
            first = next(n for n in range(last, 0, -1) if values[n - 1] != values[-1])
            yield first - 1, f"{what} their last size, {values[-1]}"
    for values, what in (
        ([row.clip for row in rows], "clipping norm"),
        ([row.weight_decay for row in rows], "weight decay"),
    ):
        for n, (before, after) in enumerate(pairwise(values), start=1):
            if before != after:
                yield n, f"{what} {before} -> {after}"
    for n in range(peak + 1, len(rows)):
        if _jumps(rates[max(n - 2, 0)], rates[n - 1], rates[n]):
            yield n, f"learning rate {format_lr(rates[n - 1])} -> {format_lr(rates[n])}"
    if rates[-1] < rates[peak]:
        floor = next(n for n in range(last, -1, -1) if n == 0 or rates[n - 1] != rates[-1])
        if floor < last:
            yield floor, f"the learning rate is at its last value, {format_lr(rates[-1])}"
    yield last, f"end, learning rate {format_lr(rates[-1])}"


def _jumps(first: float, before: float, after: float) -> bool:
    """Whether the rate moves from ``before`` to ``after`` in a way that a schedule does not."""
    moved = abs(after - before)
    return moved > _JUMP * max(before, after) and moved > _AS_BEFORE * abs(before - first)
