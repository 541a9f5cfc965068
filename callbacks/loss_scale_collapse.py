"""Detector: the loss scale of fp16 training collapses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .argument_types import judges_arguments
from .base import MisconfigurationException
from .detector import Detector, require
from .events import Event


@judges_arguments(MisconfigurationException)
@dataclass
class LossScaleCollapse(Detector):
    """The loss scale was halved ``halvings`` times in ``window`` steps or fell below ``floor``, or steps overflow on.

    A healthy run halves its scale about as often as it doubles it. One that is dying halves it again and again, since
    every step overflows; OPT's runs ended so. Below 1 gradients are made smaller than they are. A scaler with a lowest
    scale may stay there while every step overflows and is skipped, so ``overflows`` steps in a row are told of whatever
    the scale does. One event for each of the three, until the scale has risen again, or a step has not overflowed.

    Source: OPT-175B logbook; Zhang et al. 2022, arXiv:2205.01068, section 2.5.
    """

    kind: ClassVar[str] = "loss_scale_collapse"
    memory: ClassVar[tuple[str, ...]] = ("_last", "_halved", "_told", "_under_floor", "_overflows")

    halvings: int = 6
    """Halvings within the window, >= 2."""
    window: int = 100
    """Steps, >= halvings."""
    floor: float = 1.0
    """Scale below which the run is in trouble whatever came before, >= 0."""
    overflows: int = 20
    """Steps in a row that overflow, >= 2."""
    signal: str = "loss_scale"
    """Name of the scalar. ``overflow`` is read too: 1 for a step that overflowed, 0 for one that did not."""

    def __post_init__(self) -> None:
        require(
            self,
            halvings=(self.halvings >= 2, "at least 2"),
            window=(self.window >= self.halvings, "at least halvings"),
            floor=(self.floor >= 0, "0 or more"),
            overflows=(self.overflows >= 2, "at least 2"),
        )
        self._last = 0.0  # none yet
        self._halved: list[int] = []  # steps at which the scale was halved, once for each factor of 2
        self._told = self._under_floor = False
        self._overflows = 0  # in a row

    def observe(self, step: int, values: Mapping[str, float]) -> list[Event]:
        scale = values.get(self.signal, math.nan)
        found = self._judge_scale(step, scale) if math.isfinite(scale) and scale > 0 else []
        if "overflow" in values:
            self._overflows = self._overflows + 1 if values["overflow"] else 0
            if self._overflows == self.overflows:
                found.append(self._event(step, overflows=float(self._overflows)))
        return found

    def _event(self, step: int, **evidence: float) -> Event:
        return Event(step, self.kind, {"loss_scale": self._last, **evidence})

    def _judge_scale(self, step: int, scale: float) -> list[Event]:
        if self._last > scale:  # logged seldom, a fall may be of several halvings
            self._halved += [step] * max(1, round(math.log2(self._last / scale)))
        elif self._last < scale:
            self._halved, self._told = [], False
        self._last = scale
        self._halved = [s for s in self._halved if s > step - self.window]
        found = []
        if len(self._halved) >= self.halvings and not self._told:
            self._told = True
            found.append(self._event(step, halvings=float(len(self._halved))))
        under = scale < self.floor
        if under and not self._under_floor:
            found.append(self._event(step, floor=self.floor))
        self._under_floor = under
        return found
