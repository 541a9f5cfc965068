"""What happened to a run, in order: events, which of them it recovered from, and where it was still well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from lit_stable.callbacks.detector import Detector
from lit_stable.callbacks.events import Event
from lit_stable.callbacks.loss_scale_collapse import LossScaleCollapse
from lit_stable.callbacks.low_loss import LowLoss
from lit_stable.callbacks.plateau import Plateau
from lit_stable.callbacks.slow_divergence import SlowDivergence
from lit_stable.callbacks.spike_alarm import SpikeAlarm
from lit_stable.callbacks.surge import Surge
from lit_stable.diagnosis.scalars import Scalars

_SMOOTHED = 20  # values of the loss whose median says where it stands
_BACK = 0.01  # of the loss before: so near counts as recovered


@dataclass(frozen=True)
class Episode:
    """One event and what came of it."""

    event: Event
    recovered: int | None
    """Step at which the loss was back where it had been before; ``None``: not within the log."""
    well: int | None
    """Last step before it at which nothing was to be seen; ``None``: the log has none."""


def detectors(every: int = 1) -> list[Detector]:
    """The default detectors; ``every``: steps between two logged values, of which windows then hold fewer."""
    window = max(20, 100 // every)
    return [
        SpikeAlarm(),
        SlowDivergence(window=window, patience=2 * window),
        Plateau(),
        LowLoss(),
        LossScaleCollapse(),
        Surge(),
    ]


def events(scalars: Scalars) -> list[Event]:
    """What the default detectors find, in order of steps."""
    watching = detectors(scalars.every)
    found = [event for step, values in scalars.rows for one in watching for event in one.observe(step, values)]
    return sorted(found, key=lambda event: event.step)


def episodes(scalars: Scalars, found: list[Event]) -> list[Episode]:
    """Put to each event where the run was last well, and when it came back there."""
    losses = [(s, v["loss"]) for s, v in scalars.rows if math.isfinite(v.get("loss", math.nan))]
    return [_episode(event, losses) for event in found]


def _episode(event: Event, losses: list[tuple[int, float]]) -> Episode:
    best_step = event.evidence.get("best_step")
    before = [(s, v) for s, v in losses if s < event.step and (best_step is None or s <= float(best_step))]
    well = before[-1][0] if before else None
    if not before:
        return Episode(event, None, well)
    level = median(v for _, v in before[-_SMOOTHED:]) * (1 + _BACK)
    after = [(s, v) for s, v in losses if s >= event.step]
    medians = ((s, _median(after, i)) for i, (s, _) in enumerate(after[_SMOOTHED:]))
    low = event.kind == "low_loss"  # which comes back up
    return Episode(
        event, next((s for s, m in medians if (m * (1 + 5 * _BACK) >= level if low else m <= level)), None), well
    )


def _median(series: list[tuple[int, float]], start: int) -> float:
    return median(v for _, v in series[start : start + _SMOOTHED])
