"""Which step was slow, and which rank held the others up: a function of all ranks' clocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Row = Sequence[float]


class Late(NamedTuple):
    """The rank that spent the most time on its own, and how much more than the usual rank."""

    rank: int
    seconds: float


def latest(own: Row) -> Late:
    """From the time that each rank spent on its own in a step, not waiting for others.

    The usual rank is the lower median: of two the faster one.
    """
    usual = sorted(own)[(len(own) - 1) // 2]
    rank = max(range(len(own)), key=lambda r: own[r])
    return Late(rank, own[rank] - usual)


class SlowStep(NamedTuple):
    """A step that took much longer than steps usually do."""

    place: int
    """Among the steps that were looked at, from 0."""
    seconds: float
    usual: float


class UsualTime:
    """The median of the last ``window`` step times, for steps to be compared with.

    Args:
        window: Steps.
        fewest: Steps before anything is slow.
    """

    def __init__(self, window: int = 100, fewest: int = 5) -> None:
        self._window, self._fewest = window, fewest
        self._times: list[float] = []

    def slowest(self, times: Row, factor: float, margin: float) -> SlowStep | None:
        """Take in the times of some steps; of those above ``factor`` times the usual and ``margin`` over it, the worst.

        A step that is not to be judged has NaN, and teaches nothing.
        """
        found: SlowStep | None = None
        for place, seconds in enumerate(times):
            if not math.isfinite(seconds):
                continue
            usual = sorted(self._times)[len(self._times) // 2] if self._times else math.inf
            slow = len(self._times) >= self._fewest and seconds > factor * usual and seconds > usual + margin
            if slow and (found is None or seconds > found.seconds):
                found = SlowStep(place, seconds, usual)
            self._times = [*self._times, seconds][-self._window :]
        return found


def steady(late: Sequence[Late | None], limit: float) -> Late | None:
    """The rank that was late by more than ``limit`` seconds in most steps, with its mean; ``None`` if none was."""
    judged = [one for one in late if one is not None]
    for rank in {one.rank for one in judged}:
        own = [one.seconds for one in judged if one.rank == rank and one.seconds > limit]
        if len(judged) > 2 and 2 * len(own) > len(judged):
            return Late(rank, sum(own) / len(own))
    return None
