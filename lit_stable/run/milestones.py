"""Steps of a run that are worth going back to for ever: where something begins or ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lit_stable.callbacks import BatchSizeWarmup
from lit_stable.callbacks.progress import Mark
from lit_stable.optim.schedule import LRSchedule


@dataclass(frozen=True)
class Milestone:
    """A place in a run."""

    unit: str
    """``steps``, ``samples`` or ``tokens``."""
    at: int
    """Reached when so many are behind the run."""
    label: str

    def is_reached(self, before: Mark, after: Mark) -> bool:
        """Whether the step between two counters has come to it, and no step before."""
        return bool(getattr(before, self.unit) < self.at <= getattr(after, self.unit))


def milestones(schedule: LRSchedule | None, callbacks: Iterable[Any]) -> list[Milestone]:
    """The end of the warm-up, the end of each stage of a batch-size ramp, and where each override begins.

    An override is a callback with a whole number ``start`` and a ``unit``; the checkpoint is the last one without it.
    """
    found = []
    if schedule is not None and schedule.warmup_end:
        found.append(Milestone(schedule.warmup_unit or schedule.unit, schedule.warmup_end, "end of warm-up"))
    for callback in callbacks:
        if isinstance(callback, BatchSizeWarmup):
            stages = callback.schedule.reached()
            found += [Milestone("samples", after.samples, f"before batch {after.batch}") for after in stages[1:]]
        elif isinstance(getattr(callback, "start", None), int) and hasattr(callback, "unit") and callback.start:
            found.append(Milestone(callback.unit, callback.start, f"before {type(callback).__name__}"))
    return found
