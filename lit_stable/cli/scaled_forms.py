"""How quantities are scaled that are written in other ways than as one number: ramps, stages, marks, ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lit_stable.callbacks.cadence import parse_cadence
from lit_stable.callbacks.stages import StageLength, parse_count, parse_stages
from lit_stable.data.reshuffle import parse_marks
from lit_stable.data.skip import parse_steps

if TYPE_CHECKING:
    from lit_stable.cli.scale import Factors

_DOUBLING = re.compile(r"(?P<start>\S+)\s+doubling\s+at\s+(?P<marks>.+?)\s+(?P<unit>steps|samples|tokens)")


def scale_fraction(value: Any, factors: Factors, unit: str) -> Any:
    """A length, or a fraction of one, which stays."""
    return value if "." in str(value) else factors.scale(value, unit)


def scale_cadence(every: int | str, factors: Factors, unit: str, steps_apart: int = 0) -> int | str:
    """A number of steps, or ``4B tokens``; it keeps so many of the toy's full batches, or what the experiment had."""
    cadence = parse_cadence(every)
    batch = {"steps": 1, "samples": factors.full_batch, "tokens": factors.full_batch * factors.full_length}
    least = min(cadence.number, steps_apart * batch[cadence.unit])
    scaled = max(factors.scale(cadence.number, cadence.unit), least)
    return scaled if cadence.unit == unit else f"{scaled} {cadence.unit}"


def scale_validation(every: int | str, factors: Factors, unit: str) -> int | str:
    """A cadence of ten steps at least: a validation costs more than a step of a toy."""
    return scale_cadence(every, factors, unit, steps_apart=10)


def scale_ranges(requests: list[str | int], factors: Factors, unit: str) -> list[str]:
    """Steps to skip, ``13251-14000``: what stood between two marks stands between the scaled ones."""
    if factors.of(unit) == 1:
        return requests  # type: ignore[return-value]
    scaled = []
    for first, last in parse_steps(requests):
        before = factors.scale(first - 1, unit)
        scaled.append(f"{before + 1}-{max(before + 1, factors.scale(last, unit))}")
    return scaled


def scale_marks(stages: list[dict[str, Any]], factors: Factors, unit: str) -> list[dict[str, Any]]:
    """Stages that name where they begin (``from``), or where they begin and end (``start``, ``stop``)."""
    begins = [stage["from"] for stage in stages if "from" in stage]
    for stage, mark in zip(stages, rising(begins, factors, unit), strict=False):
        stage["from"] = mark
    for stage in stages:
        marks = [stage[key] for key in ("start", "stop") if stage.get(key) is not None]
        keys = [key for key in ("start", "stop") if stage.get(key) is not None]
        stage.update(zip(keys, rising(marks, factors, unit), strict=True))
    return stages


def scale_named_marks(marks: dict[str, Any], factors: Factors, unit: str) -> dict[str, Any]:
    """Marks that name their unit, as keys: ``{115500 steps: 7}``."""
    return {f"{factors.scale(count, unit)} {unit}": value for (count, unit), value in parse_marks(marks).items()}


def scale_keys(marks: dict[str, Any], factors: Factors, unit: str) -> dict[str, Any]:
    """Marks as keys, in rising order."""
    return dict(
        zip(map(str, rising([parse_count(mark) for mark in marks], factors, unit)), marks.values(), strict=True)
    )


def scale_points(points: Any, factors: Factors, unit: str) -> Any:
    """[progress, value] points; one value for the whole run stays."""
    if not isinstance(points, list):
        return points
    marks = rising([int(point[0]) for point in points], factors, unit)
    return [[mark, point[1]] for mark, point in zip(marks, points, strict=True)]


def scale_stages(text: str, factors: Factors, unit: str) -> str:
    """``64 for 1000 steps then 2048``; a word, as ``linear``, has nothing to scale."""
    return _written(_scaled(parse_stages(text), factors, unit)) if " " in text.strip() else text


def scale_ramp(ramp: Any, factors: Factors, unit: str) -> Any:
    """A batch-size ramp in any of its forms; the form with three numbers comes back as a list, doublings as stages."""
    if factors.of("samples") == factors.of("tokens") == 1:
        return ramp
    words = ramp.split() if isinstance(ramp, str) else ramp
    if len(words) == 3 and not any(isinstance(word, dict) or word == "for" for word in words):
        return _three_numbers([parse_count(word) for word in words], factors)
    if isinstance(ramp, list):
        return [{name: factors.scale(value, name) for name, value in stage.items()} for stage in ramp]
    if doubling := _DOUBLING.fullmatch(ramp.strip()):
        return _written(_scaled(list(_doublings(doubling)), factors, unit))
    return _written(_scaled(parse_stages(ramp), factors, unit))


def _three_numbers(numbers: list[int], factors: Factors) -> list[int]:
    start, increment, samples = (
        factors.scale(number, unit) for number, unit in zip(numbers, ("batch", "batch", "samples"), strict=True)
    )
    if factors.batch == 1:
        return [start, increment, samples]
    micro, full = factors.micro_batch, factors.full_batch
    start = min(start, full - micro)
    # The largest increment, up to the scaled one, that reaches the full batch.
    increment = max(n for n in range(micro, increment + 1, micro) if (full - start) % n == 0)
    return [start, increment, samples]


def _doublings(match: re.Match[str]) -> Iterable[StageLength]:
    batch, marks = parse_count(match["start"]), [parse_count(mark) for mark in re.split(r"[\s,]+", match["marks"])]
    for doublings, (begin, end) in enumerate(pairwise([0, *marks])):
        yield StageLength(batch << doublings, end - begin, match["unit"])
    yield StageLength(batch << len(marks))


def _scaled(stages: list[StageLength], factors: Factors, unit: str) -> list[StageLength]:
    return [
        StageLength(
            factors.scale(stage.value, unit),
            None if stage.length is None else factors.scale(stage.length, stage.unit),
            stage.unit,
        )
        for stage in stages
    ]


def _written(stages: list[StageLength]) -> str:
    parts = [f"{s.value}" if s.length is None else f"{s.value} for {s.length} {s.unit}" for s in stages]
    return " then ".join(parts)


def rising(marks: list[int], factors: Factors, unit: str) -> list[int]:
    """Marks scaled one by one, each at least one above the one before where it was above it."""
    scaled: list[int] = []
    for index, mark in enumerate(marks):
        smaller = factors.scale(mark, unit)
        if index and mark > marks[index - 1]:
            smaller = max(smaller, scaled[-1] + 1)
        scaled.append(smaller)
    return scaled
