"""What a detector is: it reads one run's scalars, step by step, and says when something begins to go wrong."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from .base import MisconfigurationException
from .events import Event


class Detector(ABC):
    """Streaming, plain Python, with plain state: the same online, on every rank, and over the log of a finished run.

    A detector never lets what is not finite into its statistics. One excursion is one event.
    """

    kind: ClassVar[str]
    #: Names of attributes that are the detector's memory: numbers, strings, lists, windows, detectors.
    memory: ClassVar[tuple[str, ...]]

    @abstractmethod
    def observe(self, step: int, values: Mapping[str, float]) -> list[Event]:
        """Take in the scalars of one step by name and return what begins there.

        Scalars that the detector does not know, or that lack, are passed over.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {name: _plain(getattr(self, name)) for name in self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; what the state lacks begins anew."""
        for name in self.memory:
            if name not in state:
                continue
            own, saved = getattr(self, name), state[name]
            if isinstance(own, Detector):
                own.load_state_dict(saved)
                continue
            windows = own if isinstance(own, dict) else {"": own}
            if windows and all(isinstance(window, RollingMedian) for window in windows.values()):
                for key, window in windows.items():
                    window.refill(saved.get(key, []) if isinstance(own, dict) else saved)
            else:
                setattr(self, name, _plain(saved))


def _plain(value: Any) -> Any:
    if isinstance(value, Detector):
        return value.state_dict()
    if isinstance(value, RollingMedian):
        return list(value.values)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def require(detector: Detector, name: str, holds: bool, rule: str) -> None:
    """Refuse an option that does not hold to its rule."""
    if not holds:
        option = f"`{type(detector).__name__}({name}={getattr(detector, name)!r})`"
        raise MisconfigurationException(f"{option}: must be {rule}.")


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

    def median(self) -> float:
        """The middle value, or the mean of the two in the middle; NaN of none."""
        return _middle(self._sorted)

    def spread(self) -> float:
        """Robust standard deviation: 1.4826 times the median distance from the median; NaN of none."""
        median = self.median()
        return 1.4826 * _middle(sorted(abs(v - median) for v in self._sorted))


def _middle(ordered: list[float]) -> float:
    count = len(ordered)
    return 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2]) if count else math.nan
