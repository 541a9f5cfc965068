"""Is a replay what the run was: compared only as finely as two replays agree with each other."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Values = Mapping[str, Mapping[int, float]]

#: Times the noise between replays that a difference must exceed.
ABOVE_NOISE = 3.0
#: Relative difference that is nothing where the run was on another number of ranks: sums are added up in another order.
OTHER_RANKS = 1e-3


@dataclass(frozen=True)
class Difference:
    """A number of the run that the replay does not have."""

    name: str
    step: int
    logged: float
    replayed: float

    @property
    def size(self) -> float:
        """Relative; infinite where only one of the two is finite."""
        return relative(self.logged, self.replayed)


def relative(a: float, b: float) -> float:
    """Difference of two numbers in terms of the larger; 0 of two that are both not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf if math.isfinite(a) or math.isfinite(b) else 0.0
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def noise(replays: Sequence[Values]) -> float:
    """Largest relative difference between the first replay and any other, over all steps and numbers."""
    first, *others = replays
    pairs = [(first[n][s], other[n][s]) for other in others for n in first for s in first[n] if s in other[n]]
    return max((relative(a, b) for a, b in pairs), default=0.0)


def differences(logged: Values, replayed: Values, tolerance: float) -> list[Difference]:
    """Where the replay differs from the run by more than ``tolerance``, in the order of steps."""
    both = [(n, s) for n in replayed for s in replayed[n] if s in logged.get(n, {})]
    found = [Difference(name, step, logged[name][step], replayed[name][step]) for name, step in both]
    return sorted((d for d in found if d.size > tolerance), key=lambda d: (d.step, d.name))


def logged_values(run: Path, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """What a run has logged, by name and step, from all its CSV files; of a step that was taken twice the last."""
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    for path in sorted(run.glob("csv-*/metrics.csv")):
        try:
            with path.open() as file:
                for row in csv.DictReader(file):
                    for name in names:
                        if row.get(name) and row.get("step"):
                            found[name][int(float(row["step"]))] = float(row[name])
        except (OSError, ValueError, OverflowError, csv.Error) as error:
            raise ValueError(
                f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}), so nothing can be compared with"
                " it; put it back as it was, or move it away."
            ) from error
    return found
