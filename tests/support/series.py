"""Loss curves whose right diagnosis is known, and a way to show them to a detector."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from lit_stable.callbacks.detector import Detector
from lit_stable.callbacks.events import Event

TRACES = Path(__file__).parents[1] / "traces"


def trace(name: str) -> list[float]:
    """The losses of a recorded run, step by step."""
    with (TRACES / f"{name}.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def show(detector: Detector, values: Iterable[float], name: str = "loss", start: int = 1) -> list[Event]:
    """What a detector finds in a series, one value a step."""
    return [event for step, value in enumerate(values, start) for event in detector.observe(step, {name: value})]


def noisy(steps: int, level: float = 3.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    """A constant level under normal noise."""
    source = random.Random(seed)
    return [level + noise * source.gauss(0, 1) for _ in range(steps)]


def _student(source: random.Random, freedom: int) -> float:
    return source.gauss(0, 1) / math.sqrt(sum(source.gauss(0, 1) ** 2 for _ in range(freedom)) / freedom)


#: Noise of unit scale that healthy runs show, by name; the last two have heavy tails.
NOISES: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda source: source.gauss(0, 1),
    "laplace": lambda source: source.expovariate(1) - source.expovariate(1),
    "log-normal": lambda source: math.exp(0.7 * source.gauss(0, 1)) - math.exp(0.245),
    "student-4": lambda source: _student(source, 4),
}


def healthy(noise: str, steps: int = 10_000, seed: int = 0) -> list[float]:
    """A loss that falls from 10 towards 2, as a healthy run's does."""
    source = random.Random(seed)
    return [2 + 8 * math.exp(-step / 1500) + 0.05 * NOISES[noise](source) for step in range(steps)]
