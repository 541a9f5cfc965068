"""What a learning rate becomes when its schedule is overridden: a pure function of progress."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RateChange:
    """A factor on the rate that is there, or a peak and floor for it, or another schedule instead of it.

    - ``factor``: the rate times that.
    - ``peak``: the rate scaled so that its old peak becomes this one.
    - ``horizon``: another schedule: linear rise over ``warmup``, then half a cosine (Loshchilov and Hutter 2017,
      arXiv:1608.03983, eq. 5) or a line from ``peak`` (the old one by default) to ``floor`` at ``horizon``. All lengths
      are counted from the start of the run, as Megatron-LM recomputes a schedule that is overridden on resume.
    - ``points``: another schedule: straight lines between (progress, rate), flat before the first and after the last.
    - ``floor`` without ``horizon``: the rate is never below.
    """

    factor: float | None = None
    peak: float | None = None
    floor: float | None = None
    horizon: int | None = None
    warmup: int = 0
    shape: Literal["cosine", "linear"] = "cosine"
    points: Sequence[Sequence[float]] | None = None

    @property
    def replaces(self) -> bool:
        """True when the result is no multiple of the rate that was there."""
        return self.horizon is not None or self.points is not None or self.floor is not None

    @property
    def changes_the_rate(self) -> bool:
        return any(value is not None for value in (self.factor, self.peak, self.floor, self.horizon, self.points))

    def rate(self, progress: int, rate: float, base: float, highest: float) -> float:
        """The new rate of one group.

        Args:
            progress: What was committed before the step, in the unit of the lengths.
            rate: The group's rate by its own schedule.
            base: The group's own peak.
            highest: Largest peak of any group: the one that ``peak``, ``floor`` and ``points`` speak of. The others
                keep their ratio to it.
        """
        share = base / highest
        if self.points is not None:
            return share * _interpolate(self.points, progress)
        if self.horizon is not None:
            return share * self._decayed(progress, highest if self.peak is None else self.peak)
        if self.factor is not None:
            rate = rate * self.factor
        if self.peak is not None:
            rate = self.peak * (rate / highest)
        return rate if self.floor is None else max(rate, share * self.floor)

    def _decayed(self, progress: int, peak: float) -> float:
        assert self.horizon is not None
        floor = self.floor or 0.0
        if progress < self.warmup:
            return peak * progress / self.warmup
        if progress >= self.horizon:
            return floor
        decayed = (progress - self.warmup) / (self.horizon - self.warmup)
        left = 0.5 * (1.0 + math.cos(math.pi * decayed)) if self.shape == "cosine" else 1.0 - decayed
        return floor + (peak - floor) * left

    def problems(self) -> list[str]:
        """What is wrong, one phrase each: the argument with its value, the rule, the remedy."""
        found = [f"factor={self.factor}: must be a finite number >= 0."] if _bad(self.factor) else []
        found += [f"peak={self.peak}: must be a finite number > 0."] if _bad(self.peak) or self.peak == 0 else []
        found += [f"floor={self.floor}: must be a finite number >= 0."] if _bad(self.floor) else []
        if self.peak is not None and self.floor is not None and self.floor > self.peak:
            found.append(f"floor={self.floor}: must be at most peak={self.peak}.")
        if self.horizon is None and self.warmup:
            found.append(f"warmup={self.warmup}: belongs to a new schedule; give horizon as well.")
        if self.horizon is not None and not 0 <= self.warmup < self.horizon:
            found.append(f"warmup={self.warmup}: must lie between 0 and horizon={self.horizon}, which includes it.")
        if self.factor is not None and (self.peak is not None or self.horizon is not None):
            found.append(f"factor={self.factor}: scales the schedule that is there; give it without peak and horizon.")
        if self.points is not None:
            found += self._problems_of_points()
        return found

    def _problems_of_points(self) -> list[str]:
        assert self.points is not None
        if any(value is not None for value in (self.factor, self.peak, self.floor, self.horizon)):
            return ["schedule: is all of the new schedule; give it without factor, peak, floor and horizon."]
        wellformed = self.points and all(len(p) == 2 and not _bad(p[0]) and not _bad(p[1]) for p in self.points)
        starts = [p[0] for p in self.points]
        if not wellformed or any(b <= a for a, b in itertools.pairwise(starts)):
            return [f"schedule={self.points}: must be [progress, rate] pairs >= 0 with rising progress."]
        return []


def _bad(value: float | None) -> bool:
    return value is not None and not (value >= 0 and math.isfinite(value))


def _interpolate(points: Sequence[Sequence[float]], progress: int) -> float:
    """Straight lines between (progress, rate), flat outside."""
    if progress <= points[0][0]:
        return points[0][1]
    for (start, rate), (stop, next_rate) in itertools.pairwise(points):
        if progress < stop:
            return rate + (next_rate - rate) * (progress - start) / (stop - start)
    return points[-1][1]
