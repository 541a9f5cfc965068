"""Detector: a value far above those before it, or not finite at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .argument_types import judges_arguments
from .base import MisconfigurationException
from .detector import Detector, require
from .events import Event
from .excursion import Excursion
from .rolling_median import RollingMedian

_FAR = 4.0  # times the band's width, at which one value is enough


@judges_arguments(MisconfigurationException)
@dataclass
class SpikeAlarm(Detector):
    """Loss or gradient norm leaves the band of the values accepted before it.

    The band is median + ``z_score`` robust standard deviations of the last ``window`` accepted values; the deviation
    has a floor of ``min_spread`` of the median, since a constant history has none of its own. A value in an excursion
    is not taken in, so a second spike is judged like the first. A value four times as far from the median as the band
    is wide is found at once, a nearer one when it is the second within three steps: lone outliers of a heavy-tailed but
    healthy run are left alone. What is not finite is found at once, also during warm-up.

    An excursion is one event; it ends after five steps inside in a row. After ``adapt`` steps outside in a row the
    window begins anew: a shift of level is one event, not one for ever.

    Evidence: the signal, its value, the band's upper end.
    """

    kind: ClassVar[str] = "spike"
    memory: ClassVar[tuple[str, ...]] = ("_bands", "_excursions")

    signals: list[str] = field(default_factory=lambda: ["loss", "grad_norm"])
    """Names of the scalars that are judged, each by itself."""
    z_score: float = 16.0
    """Width of the band, in robust standard deviations, > 0."""
    window: int = 128
    """Accepted values that make the band, >= 8."""
    warmup: int = 64
    """Values to take in before the band is in force, >= 2."""
    min_spread: float = 0.01
    """Floor on the deviation, as a fraction of the median, >= 0."""
    adapt: int = 50
    """Steps outside in a row after which the new level is the normal one, >= 1."""

    def __post_init__(self) -> None:
        require(
            self,
            z_score=(self.z_score > 0, "above 0"),
            window=(self.window >= 8, "at least 8"),
            warmup=(2 <= self.warmup <= self.window, "from 2 to window"),
            min_spread=(self.min_spread >= 0, "0 or more"),
            adapt=(self.adapt >= 1, "at least 1"),
        )
        self._bands = {name: RollingMedian(self.window) for name in self.signals}
        self._excursions = {name: Excursion(self.adapt) for name in self.signals}

    def observe(self, step: int, values: Mapping[str, float]) -> list[Event]:
        found = (self._judge(step, name, values[name]) for name in self.signals if name in values)
        return [event for event in found if event is not None]

    def _judge(self, step: int, name: str, value: float) -> Event | None:
        band, excursion = self._bands[name], self._excursions[name]
        median, width = band.median(), math.inf
        if len(band) >= self.warmup:
            width = self.z_score * max(band.spread(), self.min_spread * abs(median))
        finite = math.isfinite(value)
        outside = not finite or value - median > width
        begins = excursion.begins(outside, far=not finite or value - median > _FAR * width)
        if not outside:
            band.push(value)
        elif finite and excursion.is_new_normal:
            band.refill([value])
        if not begins:
            return None
        evidence: dict[str, Any] = {"signal": name, "value": value, "limit": median + width}
        return Event(step, self.kind if finite else "not_finite", evidence)
