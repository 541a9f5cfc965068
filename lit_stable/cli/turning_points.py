"""Where something changes in a run: the few rows of its trace that are worth reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lit_stable.cli.trace import Trace
from lit_stable.optim.schedule import format_lr

_JUMP = 0.01  # of the rate in one iteration
_AS_BEFORE = 4.0  # times what it moved in the one before: the decay of a short run moves as far at every iteration
_MANY = 24


def turning_points(trace: Trace) -> str:
    """A table: iteration, samples, tokens, and what is so from the next iteration on."""
    found = sorted(_turning_points(trace))
    shown = found if len(found) <= _MANY else [*found[: _MANY - 1], found[-1]]
    rows = [(trace[n], what) for n, what in shown]
    lines = [f"  {row.iteration:>11,}  {row.samples:>15,}  {row.tokens:>19,}  {what}" for row, what in rows]
    more = [f"  ({len(found) - len(shown)} more; --trace FILE has every iteration)"] if len(found) > len(shown) else []
    return "\n".join([f"turning points:\n  {'iteration':>11}  {'samples':>15}  {'tokens':>19}", *lines, *more])


def _turning_points(trace: Trace) -> Iterator[tuple[int, str]]:
    """(index of a row, what happens there)."""
    rates = trace.lr
    peak, last = int(rates.argmax()), len(trace) - 1
    yield peak, f"the learning rate is at its highest, {format_lr(rates[peak])}"
    for values, what in ((trace.batch, "batches have"), (trace.length, "sequences have")):
        if values[0] != values[-1]:
            yield _last_other(values), f"{what} their last size, {values[-1]}"
    for values, what in ((trace.clip, "clipping norm"), (trace.weight_decay, "weight decay")):
        for n in (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist():
            yield n, f"{what} {values[n - 1]} -> {values[n]}"
    for n in _jumps(rates):
        if n > peak:
            yield n, f"learning rate {format_lr(rates[n - 1])} -> {format_lr(rates[n])}"
    if rates[-1] < rates[peak]:
        floor = _last_other(rates) + 1
        if floor < last:
            yield floor, f"the learning rate is at its last value, {format_lr(rates[-1])}"
    yield last, f"end, learning rate {format_lr(rates[-1])}"


def _last_other(values: np.ndarray[Any, Any]) -> int:
    """The last index at which something else stands than at the end, where there is one."""
    return int(np.flatnonzero(values != values[-1])[-1])


def _jumps(rates: np.ndarray[Any, Any]) -> list[int]:
    """Where the rate has moved from the row before in a way that a schedule does not."""
    moved = np.abs(np.diff(rates))
    before = np.concatenate([[0.0], moved])[:-1]  # nothing has moved before the second row
    jumps = (moved > _JUMP * np.maximum(rates[:-1], rates[1:])) & (moved > _AS_BEFORE * before)
    return [int(n) + 1 for n in np.flatnonzero(jumps)]
