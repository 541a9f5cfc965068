"""Reading a batch later on a CPU, as it is on a GPU."""

from __future__ import annotations

from lit_stable.callbacks import LateReads
from lit_stable.callbacks.event_ring import EventRing


def lagging() -> LateReads:
    """`LateReads` with rows in flight."""
    late = LateReads()
    late._ring = EventRing(lag=1, cpu_lag=1)
    return late
