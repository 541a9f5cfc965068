"""The band in which a run's loss moves, and whether it is back there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from .rolling_median import RollingMedian

_WINDOW = 128  # accepted losses
_RECENT = 5  # steps whose median is compared, so that one lucky batch is no return
_FEWEST = 8  # accepted losses before there is a band
_MIN_SPREAD = 0.01  # of the level: a constant history has no spread of its own


class LossBand:
    """Level and spread of the last 128 losses that were accepted; what happens in trouble is not accepted."""

    def __init__(self) -> None:
        self._accepted = RollingMedian(_WINDOW)
        self._recent: list[float] = []

    def observe(self, loss: float, accept: bool) -> None:
        """Take in a step's loss."""
        self._recent = [*self._recent, loss][-_RECENT:]
        if accept:
            self._accepted.push(loss)

    def forget_recent(self) -> None:
        """Judge what comes from here on alone."""
        self._recent = []

    @property
    def level(self) -> float:
        """Median of the accepted losses; infinity while they are too few."""
        return self._accepted.median() if len(self._accepted) >= _FEWEST else math.inf

    @property
    def spread(self) -> float:
        """Their robust standard deviation, at least a hundredth of the level."""
        return max(self._accepted.spread(), _MIN_SPREAD * abs(self.level)) if math.isfinite(self.level) else 0.0

    def is_inside(self, within: float, level: float, spread: float) -> bool:
        """Whether the last five losses are finite and their median is within so many deviations of a level."""
        if len(self._recent) < _RECENT or not all(map(math.isfinite, self._recent)):
            return False
        return median(self._recent) <= level + within * spread

    def is_well(self, within: float = 3.0) -> bool:
        """Whether the last losses, five or fewer, are finite and where the accepted ones are."""
        if not all(map(math.isfinite, self._recent)):
            return False
        return len(self._recent) < _RECENT or self.is_inside(within, self.level, self.spread)

    def state_dict(self) -> dict[str, Any]:
        """Plain lists."""
        return {"accepted": self._accepted.state_dict(), "recent": list(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore."""
        self._accepted.load_state_dict(state["accepted"])
        self._recent = [float(v) for v in state["recent"]]
