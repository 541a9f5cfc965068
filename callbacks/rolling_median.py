"""Median and spread of the last values of a series, on the host."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from .spike_detector import MAD_TO_SIGMA


class RollingMedian:
    """Median and spread of the last ``size`` finite values; two kept lists, one in order of time, one of value."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_full(self) -> bool:
        """Whether ``size`` values were taken in."""
        return len(self.values) == self.size

    def push(self, value: float) -> None:
        """Take in a value, and let the oldest go when there are more than ``size``; one not finite is passed over."""
        if not math.isfinite(value):
            return
        self.values.append(value)
        insort(self._sorted, value)
        if len(self.values) > self.size:
            oldest = self.values.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]

    def refill(self, values: Iterable[float]) -> None:
        """Forget all and take in these, oldest first."""
        self.values.clear()
        self._sorted.clear()
        for value in values:
            self.push(float(value))

    def state_dict(self) -> list[float]:
        """The values, oldest first."""
        return list(self.values)

    def load_state_dict(self, state: Iterable[float]) -> None:
        """Restore them."""
        self.refill(state)

    def median(self) -> float:
        """The middle value, or the mean of the two in the middle; NaN of none."""
        return _middle(self._sorted)

    def spread(self) -> float:
        """Robust standard deviation, from the median distance from the median; NaN of none."""
        median = self.median()
        return MAD_TO_SIGMA * _middle(sorted(abs(v - median) for v in self._sorted))


def _middle(ordered: list[float]) -> float:
    count = len(ordered)
    return 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2]) if count else math.nan
