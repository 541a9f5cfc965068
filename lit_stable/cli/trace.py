"""The schedules of a whole run, step by step, without running it: `lit-stable check --trace FILE`.

What the run asks at each step is asked here, of the same objects: the batch-size ramp, the sequence lengths, the
learning rate as the features modify it, the clipping norm.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterable, Iterator
from operator import sub
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightning.pytorch import Callback

from lit_stable.callbacks import (
    BatchSizeWarmup,
    GradClip,
    LROverride,
    OptimizerReset,
    ScriptedSkip,
    SequenceLengthWarmup,
)
from lit_stable.callbacks.learning_rate import EffectiveLR
from lit_stable.callbacks.progress import Mark
from lit_stable.optim.schedule import LRSchedule

_Feature = TypeVar("_Feature", bound=Callback)
_START = Mark(0, 0, 0)


class Row(NamedTuple):
    """The state after an iteration; ``batch`` and ``length`` are those that it used."""

    iteration: int
    """Optimizer step, counted from 1."""
    samples: int
    """Consumed samples."""
    tokens: int
    """Consumed tokens."""
    batch: int
    """Samples of this iteration."""
    length: int
    """Positions per sequence of this iteration."""
    lr: float
    """Learning rate of the first parameter group, as the next iteration uses it."""
    weight_decay: float
    """Of the groups that decay, likewise."""
    clip: float | None
    """Largest gradient norm, likewise; None: there is none but what statistics find."""


def trace(
    schedule: LRSchedule,
    weight_decay: float,
    global_batch: int,
    sequence_length: int,
    features: Iterable[Callback],
    steps: int,
    resumed_at: int = 0,
) -> Iterator[Row]:
    """The rows of iterations 1 to ``steps`` of an uninterrupted run.

    Args:
        schedule: The learning rate.
        weight_decay: Of the groups that decay.
        global_batch: Samples per step; under a ramp, at its end.
        sequence_length: Positions per sequence, in the end.
        features: The active features; those that change none of the columns do not matter. They are left as they are.
        steps: Optimizer steps of the run.
        resumed_at: Step after which the run is resumed: where a feature acts that acts on resume.
    """
    features = [copy.copy(feature) for feature in features]
    ramp, lengths = _find(features, BatchSizeWarmup), _find(features, SequenceLengthWarmup)
    clip = next((c for c in features if isinstance(c, GradClip) and c.action == "act"), None)
    skip = _find(features, ScriptedSkip)
    modifiers = _Modifiers(schedule, features, resumed_at)
    mark = held = _START
    modifiers.reach(mark)
    for step in range(1, steps + 1):
        batch = global_batch if ramp is None else ramp.batch(mark.samples)
        length = sequence_length if lengths is None else lengths.length(step)
        tokens = batch * length if lengths is None else lengths.tokens_in(batch, step)
        mark = Mark(step, mark.samples + batch, mark.tokens + tokens)
        if skip is not None and skip.holds(step):
            held = Mark(held.steps + 1, held.samples + batch, held.tokens + tokens)
        modifiers.reach(mark)
        lr = modifiers.value("lr", mark, schedule.rate(mark if held == _START else _without(mark, held)))
        decay = modifiers.value("weight_decay", mark, weight_decay)
        yield Row(step, mark.samples, mark.tokens, batch, length, lr, decay, clip.cap(mark) if clip else None)


class _Modifiers:
    """What the features make of learning rate and weight decay, by the function that the run uses."""

    def __init__(self, schedule: LRSchedule, features: list[Callback], resumed_at: int) -> None:
        self._effective = EffectiveLR()
        self._peak, self._resumed_at = schedule.peak, resumed_at
        self._override, self._reset = _find(features, LROverride), _find(features, OptimizerReset)
        for feature in (_find(features, BatchSizeWarmup), self._override, self._reset):
            if feature is not None:
                feature.modify(self._effective)
        if self._override is not None:
            self._override.modify_clip(features)
        self._keys = self._effective.keys

    def reach(self, mark: Mark) -> None:
        """Begin what begins when a step opens at these counters."""
        resumes = mark.steps == self._resumed_at
        if self._override is not None and (resumes or mark == _START):
            self._override.begin(mark if resumes else None, [self._peak])
        reset = self._reset
        # Without a start a reset waits for a resume, and a run that begins has nothing to reset.
        if reset is not None and reset.is_due(mark) and (reset.start is not None or (resumes and mark.steps)):
            reset.done = mark

    def value(self, key: str, mark: Mark, value: float) -> float:
        """The value of the step that opens at these counters."""
        return float(self._effective.effective(key, mark, value, 0)) if key in self._keys else value


def write_trace(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as CSV with a header; numbers in full, so that they compare equal to those of a run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)


def _without(mark: Mark, held: Mark) -> Mark:
    return Mark(*map(sub, mark, held))


def _find(features: Iterable[Callback], kind: type[_Feature]) -> _Feature | None:
    return next((feature for feature in features if isinstance(feature, kind)), None)
