"""Detector: a loss that is too good to be true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .argument_types import judges_arguments
from .base import MisconfigurationException
from .detector import Detector, require
from .events import Event
from .excursion import Excursion
from .rolling_median import RollingMedian


@judges_arguments(MisconfigurationException)
@dataclass
class LowLoss(Detector):
    """The loss of a batch falls far below those before it, or the running median below ``floor``.

    Text that repeats itself is learned at once: OPT's runs learned escape characters that a deduplication had left by
    the million, and the loss looked better for it. A batch is too low when it lies below the median by more than
    ``z_score`` robust standard deviations and more than ``drop`` of the median; such a value is not taken in. It is
    found at once when it is below half of the median, else when it is the second within three steps. An excursion is
    one event and ends after five steps inside. After ``adapt`` low steps in a row the level is the new one.

    Source: OPT-175B logbook (escape characters in the corpus); Zhang et al. 2022, arXiv:2205.01068.
    """

    kind: ClassVar[str] = "low_loss"
    memory: ClassVar[tuple[str, ...]] = ("_band", "_excursion", "_under_floor")

    signal: str = "loss"
    """Name of the scalar."""
    z_score: float = 16.0
    """Distance below the median, in robust standard deviations, > 0."""
    drop: float = 0.1
    """Distance below the median, as a fraction of it, in (0, 1)."""
    floor: float | None = None
    """Median loss, in nats, below which no honest model of this text can be; ``None``: off."""
    window: int = 128
    """Accepted values that make the median, >= 8."""
    warmup: int = 64
    """Values to take in before the band is in force, >= 2."""
    adapt: int = 50
    """Low steps in a row after which the level is the new one, >= 1."""

    def __post_init__(self) -> None:
        require(
            self,
            z_score=(self.z_score > 0, "above 0"),
            drop=(0 < self.drop < 1, "within (0, 1)"),
            window=(self.window >= 8, "at least 8"),
            warmup=(2 <= self.warmup <= self.window, "from 2 to window"),
            adapt=(self.adapt >= 1, "at least 1"),
        )
        self._band = RollingMedian(self.window)
        self._excursion = Excursion(self.adapt)
        self._under_floor = False

    def observe(self, step: int, values: Mapping[str, float]) -> list[Event]:
        value = values.get(self.signal, math.nan)
        if not math.isfinite(value):
            return []
        limit, median = -math.inf, self._band.median()
        if len(self._band) >= self.warmup:
            limit = min(median - self.z_score * self._band.spread(), (1 - self.drop) * median)
        low = value < limit
        begins = self._excursion.begins(low, far=value < 0.5 * median)
        if not low:
            self._band.push(value)
        elif self._excursion.is_new_normal:
            self._band.refill([value])
        if begins:
            return [self._event(step, value, limit)]
        return self._judge_floor(step)

    def _judge_floor(self, step: int) -> list[Event]:
        median = self._band.median()
        under = self.floor is not None and len(self._band) >= self.warmup and median < self.floor
        first, self._under_floor = under and not self._under_floor, under
        return [self._event(step, median, float(self.floor or 0.0))] if first else []

    def _event(self, step: int, value: float, limit: float) -> Event:
        return Event(step, self.kind, {"loss": value, "limit": limit})
