"""Detector: the loss rises slowly and stays above its best, with no spike to see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .argument_types import judges_arguments
from .base import MisconfigurationException
from .detector import Detector, require
from .events import Event
from .rolling_median import RollingMedian
from .spike_alarm import SpikeAlarm


@judges_arguments(MisconfigurationException)
@dataclass
class SlowDivergence(Detector):
    """The median loss is above the best median so far, and has not fallen, for ``patience`` steps in a row.

    "Above" is by more than ``rise`` of the best and more than one robust standard deviation of the loss around it.
    "Not fallen" compares with the median one window ago, so that a run on its way back is left alone; and after a spike
    (``SpikeAlarm`` finds those) the best begins anew. Each divergence is one event; the next needs a return to within
    the margin first.

    Evidence: the median loss, the best one and its step, which is the last step known to be good.
    """

    kind: ClassVar[str] = "slow_divergence"
    memory: ClassVar[tuple[str, ...]] = (
        *("_spikes", "_recent", "_past"),
        *("_best", "_best_step", "_best_spread", "_above", "_told"),
    )

    signal: str = "loss"
    """Name of the scalar."""
    window: int = 100
    """Steps of the running median, >= 10."""
    rise: float = 0.03
    """Rise above the best median, as a fraction of it, > 0."""
    patience: int = 200
    """Steps above and not falling, in a row, >= window: a spike's own rise fills one window."""

    def __post_init__(self) -> None:
        require(
            self,
            window=(self.window >= 10, "at least 10"),
            rise=(self.rise > 0, "above 0"),
            patience=(self.patience >= self.window, "at least window"),
        )
        self._spikes = SpikeAlarm(signals=[self.signal])
        self._forget()

    def _forget(self) -> None:
        self._recent = RollingMedian(self.window)
        self._past: list[float] = []  # medians of the last `window` steps, oldest first
        self._best, self._best_step, self._best_spread = math.inf, 0, 0.0
        self._above = 0
        self._told = False

    def observe(self, step: int, values: Mapping[str, float]) -> list[Event]:
        if self._spikes.observe(step, values):
            self._forget()
        value = values.get(self.signal, math.nan)
        self._recent.push(value)
        if not math.isfinite(value) or not self._recent.is_full:
            return []
        median = self._recent.median()
        before = self._past[0] if len(self._past) == self.window else -math.inf
        self._past = [*self._past, median][-self.window :]
        if median < self._best:
            self._best, self._best_step, self._best_spread = median, step, self._recent.spread()
        if median <= self._best + max(self.rise * abs(self._best), self._best_spread):
            self._above, self._told = 0, False
            return []
        self._above = self._above + 1 if median >= before else 0
        if self._above < self.patience or self._told:
            return []
        self._told = True
        evidence: dict[str, Any] = {
            "median_loss": median,
            "best": self._best,
            "best_step": float(self._best_step),
        }
        return [Event(step, self.kind, evidence)]
