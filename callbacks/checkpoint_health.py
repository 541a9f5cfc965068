"""Whether what is about to be saved is worth going back to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

#: Where :class:`~.activation_monitor.ActivationMonitor` logs.
ACTIVATIONS = "stability/activation_rms/"
_RISE = 1.1  # factor between the first and the last quarter of the values kept
_FEWEST = 8  # values, or nothing is said of them
KEPT = 20


def largest_activation(metrics: Mapping[str, Any]) -> float | None:
    """The largest root mean square of activations that was logged last; ``None`` if none is measured."""
    found = [float(value) for name, value in metrics.items() if name.startswith(ACTIVATIONS)]
    return max(found) if found else None


def is_rising(values: Sequence[float]) -> bool:
    """Whether a series ends a tenth above where it began, by the medians of its first and its last quarter."""
    if any(not math.isfinite(value) for value in values):
        return True
    quarter = len(values) // 4
    return len(values) >= _FEWEST and median(values[-quarter:]) > _RISE * median(values[:quarter])


def health(loss_is_well: bool, in_trouble: bool, scale: float | None, activations: Sequence[float]) -> dict[str, Any]:
    """What is judged, each by name with its verdict; what is not measured is not judged.

    Healthy is: no trouble under way; the last five losses are finite and in their band; a loss scale of at least 1;
    activations that are not rising.
    """
    found: dict[str, Any] = {"loss_in_band": loss_is_well, "no_trouble": not in_trouble}
    if scale is not None:
        found["loss_scale_at_least_1"] = scale >= 1
    if len(activations) >= _FEWEST:
        found["activations_not_rising"] = not is_rising(activations)
    return {"healthy": all(found.values()), **found}
