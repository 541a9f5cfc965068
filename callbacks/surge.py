"""Detector: a quantity of the inside grows steadily, which often leads the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar

from .argument_types import judges_arguments
from .base import MisconfigurationException
from .detector import Detector, require
from .events import Event

_FEWEST = 6  # observations to judge by; where fewer lie in the window it is as long as they need
_STEADY = 0.8  # of the first half's growth in the second: noise moves both


@judges_arguments(MisconfigurationException)
@dataclass
class Surge(Detector):
    """A quantity has multiplied by ``factor`` within ``window`` steps, and its growth has not slowed down.

    Early in training everything grows, but ever more slowly; what runs away grows by a constant factor a step, or
    faster. So the second half of the window must have grown, in logarithm, about as much as the first. Values are
    smoothed by medians of three. Values at or below 0 are passed over. One surge is one event, for each quantity by
    itself; the next needs a fall below half of what was reached first.

    Evidence: the quantity, its value, the value one window ago.

    Source: the vision-language team of Hugging Face saw activations and gradients rise many steps before the loss.
    """

    kind: ClassVar[str] = "surge"
    memory: ClassVar[tuple[str, ...]] = ("_steps", "_values", "_peaks")

    signals: list[str] = field(
        default_factory=lambda: ["*activation*", "*attention*logit*", "*norm_gain*", "*log_z*", "*update_rms*"]
    )
    """Shell patterns of the scalars that are watched, each by itself."""
    factor: float = 2.0
    """Growth within the window, > 1."""
    window: int = 200
    """Optimizer steps over which growth is measured, >= 20."""
    warmup: int = 500
    """First step at which it is in force, >= 0."""

    def __post_init__(self) -> None:
        require(
            self,
            factor=(self.factor > 1, "above 1"),
            window=(self.window >= 20, "at least 20"),
            warmup=(self.warmup >= 0, "0 or more"),
        )
        # Of each quantity about the last twenty observations in the window, oldest first, and their steps.
        self._steps: dict[str, list[int]] = {}
        self._values: dict[str, list[float]] = {}
        self._peaks: dict[str, float] = {}  # of surges that were found and have not ended

    def observe(self, step: int, values: Mapping[str, float]) -> list[Event]:
        found = []
        for name, value in values.items():
            if math.isfinite(value) and value > 0 and any(fnmatchcase(name, one) for one in self.signals):
                found += self._judge(step, name, value)
        return found

    def _judge(self, step: int, name: str, value: float) -> list[Event]:
        steps, series = self._steps.setdefault(name, []), self._values.setdefault(name, [])
        if steps and step < steps[-1] + self.window // 20:
            return []
        steps.append(step)
        series.append(value)
        while len(steps) > _FEWEST and steps[1] <= step - self.window:  # the oldest lies just outside
            del steps[0], series[0]
        if name in self._peaks:
            self._follow(name, value)
            return []
        if step < self.warmup or steps[0] > step - self.window or len(series) < _FEWEST:
            return []
        half = len(series) // 2
        start, middle, end = (sorted(series[i - 1 : i + 2])[1] for i in (1, half, len(series) - 2))
        early = math.log(middle / start) / (steps[half] - steps[1])  # growth a step, in logarithm
        late = math.log(end / middle) / (steps[-2] - steps[half])
        whole = math.log(end / start) / (steps[-2] - steps[1])
        if whole * self.window < math.log(self.factor) or late < _STEADY * early:
            return []
        self._peaks[name] = value
        return [Event(step, self.kind, {"signal": name, "value": value, "before": start})]

    def _follow(self, name: str, value: float) -> None:
        if value < 0.5 * self._peaks[name]:
            del self._peaks[name]
        else:
            self._peaks[name] = max(self._peaks[name], value)
