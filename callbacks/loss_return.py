"""How long a loss takes to come back after a spike: plain Python over one number per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from .rolling_median import RollingMedian

_SMOOTHED = 5  # steps whose median is compared, so that one lucky batch is no recovery
_FEWEST = 20  # accepted losses before anything is a spike


class Recovered(NamedTuple):
    """A spike that is over, or was given up."""

    step: int
    """The step at which that was seen."""
    began: int
    """First step of the spike."""
    before: float
    """The loss that it had to come back to."""
    peak: float
    """Largest loss in between; infinity if one was not finite."""
    back: bool
    """False: given up after ``patience`` steps; the level it has now is the new normal."""


class LossReturn:
    """Watch one run's loss, step by step.

    A spike begins with a loss more than ``rise`` above the median of the last ``window`` accepted losses, and more than
    six robust standard deviations of them, or not finite. It is over when the median of five losses is within two of
    those deviations of that median again. Losses of a spike are not accepted, so they cannot raise what it must come
    back to.

    Args:
        window: Accepted losses to compare with.
        rise: In the loss's own unit, > 0.
        patience: Steps after which it is given up.

    Attributes:
        last: Steps that the last spike took, from its first loss to the first of the five; 0: there was none.
        spikes: How many there were.
    """

    def __init__(self, window: int, rise: float, patience: int) -> None:
        self._rise, self._patience = rise, patience
        self._accepted = RollingMedian(window)
        self._recent: list[float] = []
        self._began: int | None = None
        self._before = self._spread = self._peak = 0.0
        self.last = 0
        self.spikes = 0

    def steps_since(self, step: int) -> int:
        """How long the present spike has lasted at a step; 0: there is none."""
        return 0 if self._began is None else step - self._began + 1

    def observe(self, step: int, loss: float) -> Recovered | None:
        """Take in the loss of a step."""
        self._recent = [*self._recent, loss][-_SMOOTHED:]
        if self._began is None:
            self._watch_for_spike(step, loss)
            return None
        self._peak = max(self._peak, loss if math.isfinite(loss) else math.inf)
        if self._is_back():
            return self._end(step, back=True)
        return self._end(step, back=False) if self.steps_since(step) > self._patience else None

    def _watch_for_spike(self, step: int, loss: float) -> None:
        if len(self._accepted) >= _FEWEST:
            before, spread = self._accepted.median(), self._accepted.spread()
            if not loss <= before + max(self._rise, 6 * spread):  # so written that NaN is above
                self._began, self._before, self._spread = step, before, spread
                self._peak = loss if math.isfinite(loss) else math.inf
                self._recent = [loss]
                self.spikes += 1
                return
        self._accepted.push(loss)

    def _is_back(self) -> bool:
        if len(self._recent) < _SMOOTHED or not all(map(math.isfinite, self._recent)):
            return False
        return median(self._recent) <= self._before + max(2 * self._spread, 0.1 * self._rise)

    def _end(self, step: int, back: bool) -> Recovered:
        assert self._began is not None
        ended = Recovered(step, self._began, self._before, self._peak, back)
        self.last = step - self._began + 1 - (_SMOOTHED if back else 0)
        if not back:
            self._accepted.refill(self._recent)
        self._began = None
        return ended

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        level: Sequence[float] = (self._before, self._spread, self._peak)
        return {
            "accepted": self._accepted.state_dict(),
            "recent": list(self._recent),
            "began": self._began,
            "level": list(level),
            "last": self.last,
            "spikes": self.spikes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self._accepted.load_state_dict(state["accepted"])
        self._recent = [float(v) for v in state["recent"]]
        self._began = state["began"]
        self._before, self._spread, self._peak = state["level"]
        self.last, self.spikes = int(state["last"]), int(state["spikes"])
