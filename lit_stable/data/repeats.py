"""Find stretches of tokens that repeat with a short period, in whole batches at once.

A stretch has period p when every token in it equals the one p places before.

Processes of `prepare` import this: nothing here needs torch or Lightning.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# B rows, L tokens a row, p the period


def in_repeats(tokens: npt.NDArray[np.integer], max_period: int, min_count: int) -> npt.NDArray[np.bool_]:
    """Which of the ``tokens`` (B, L) stand in a stretch that holds a short enough period often enough, (B, L).

    Example::

        >>> in_repeats(np.array([[9, 1, 2, 1, 2, 1, 2, 8]]), max_period=2, min_count=3).astype(int)
        array([[0, 1, 1, 1, 1, 1, 1, 0]])
    """
    length = tokens.shape[1]
    found = np.zeros(tokens.shape, dtype=bool)
    for period in range(1, max_period + 1):
        run = period * (min_count - 1)  # so many tokens in a row equal those a period before
        if length < run + period:
            break
        rows = _candidates(tokens, run, period)  # few, in ordinary text
        if rows.size:
            equal = tokens[rows, period:] == tokens[rows, :-period]  # (R, L - p)
            found[rows] |= _covered(equal, run, period)
    return found


def _candidates(tokens: npt.NDArray[np.integer], run: int, period: int) -> npt.NDArray[np.int64]:
    """Rows that may hold ``run`` equal tokens in a row, each a period apart, by a look at every few of them.

    Among so many places that follow each other, at least ``run // step`` are multiples of ``step``.
    """
    step = max(1, run // 4)
    count = run // step
    equal = tokens[:, period::step] == tokens[:, :-period:step]
    last = equal.shape[1] - count + 1
    runs = equal[:, :last].copy()
    for shift in range(1, count):
        runs &= equal[:, shift : last + shift]
    return np.flatnonzero(runs.any(axis=1))


def _covered(equal: npt.NDArray[np.bool_], run: int, period: int) -> npt.NDArray[np.bool_]:
    """The tokens under every run of at least ``run`` True in ``equal`` (R, L - p) and the period before it, (R, L)."""
    rows, length = equal.shape[0], equal.shape[1] + period
    sums = np.zeros((rows, equal.shape[1] + 1), dtype=np.int64)
    np.cumsum(equal, axis=1, out=sums[:, 1:])
    begins = sums[:, run:] - sums[:, :-run] == run  # (R, L - p - run + 1): a run begins at this place
    edges = np.zeros((rows, length + 1), dtype=np.int64)
    edges[:, : begins.shape[1]] += begins
    edges[:, run + period : run + period + begins.shape[1]] -= begins
    return np.cumsum(edges, axis=1)[:, :-1] > 0
