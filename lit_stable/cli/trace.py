"""The schedules of a whole run, step by step, without running it: `lit-stable check --trace FILE`.

What the run asks at each step is asked here, of the same objects: the batch-size ramp, the sequence lengths, the
learning rate as the features modify it, the clipping norm. What is constant over a stretch is asked once; a run has a
hundred thousand iterations and more, so they are kept by columns.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
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


@dataclass(frozen=True, eq=False)
class Trace(Sequence[Row]):
    """Rows by columns, each of one value an iteration; see `Row`."""

    iteration: np.ndarray[Any, Any]
    samples: np.ndarray[Any, Any]
    tokens: np.ndarray[Any, Any]
    batch: np.ndarray[Any, Any]
    length: np.ndarray[Any, Any]
    lr: np.ndarray[Any, Any]
    weight_decay: np.ndarray[Any, Any]
    clip: np.ndarray[Any, Any]  # of objects: None stands in it

    def __len__(self) -> int:
        return len(self.iteration)

    def __iter__(self) -> Iterator[Row]:
        return map(Row, *(column.tolist() for column in self._columns()))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Trace: ...
    def __getitem__(self, index: int | slice) -> Row | Trace:
        if isinstance(index, slice):
            return Trace(*(column[index] for column in self._columns()))
        (row,) = Trace(*(column[[index]] for column in self._columns()))
        return row

    def _columns(self) -> Iterator[np.ndarray[Any, Any]]:
        return (getattr(self, name) for name in Row._fields)


def trace(
    schedule: LRSchedule,
    weight_decay: float,
    global_batch: int,
    sequence_length: int,
    features: Iterable[Callback],
    steps: int,
    resumed_at: int = 0,
) -> Trace:
    """Iterations 1 to ``steps`` of an uninterrupted run.

    Args:
        schedule: The learning rate.
        weight_decay: Of the groups that decay.
        global_batch: Samples per step; under a ramp, at its end.
        sequence_length: Positions per sequence, in the end.
        features: The active features; those that change none of the columns do not matter. They are left as they are.
        steps: Optimizer steps of the run; below 1, there is no iteration.
        resumed_at: Step after which the run is resumed: where a feature acts that acts on resume.
    """
    features = [copy.copy(feature) for feature in features]
    used, length = _used(features, global_batch, sequence_length, max(steps, 0))
    committed = used.cumsum(axis=1)
    rates = [schedule.rate(mark) for mark in _marks(_scheduled(features, used))]
    modifiers = _Modifiers(schedule, features, resumed_at)
    clip = next((c for c in features if isinstance(c, GradClip) and c.action == "act"), None)
    lr, decay, clips = [], [], []
    for first, end in pairwise([*modifiers.begin_at(committed), len(rates)]):
        stretch = committed[:, first:end]
        modifiers.reach(next(_marks(stretch)))
        lr += modifiers.values("lr", stretch, rates[first:end])
        decay += modifiers.values("weight_decay", stretch, [weight_decay] * (end - first))
        clips += _clips(clip, stretch)
    iteration, samples, tokens = committed
    columns = np.array(lr, float), np.array(decay, float), np.array(clips, object)
    return Trace(iteration, samples, tokens, used[1], length, *columns)


def _used(
    features: list[Callback], global_batch: int, sequence_length: int, steps: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of each iteration: (3, steps) the step that it is, its samples and its tokens; and (steps,) its length."""
    ramp, lengths = _find(features, BatchSizeWarmup), _find(features, SequenceLengthWarmup)
    batch = np.full(steps, global_batch)
    for stage in [] if ramp is None else ramp.schedule.reached():
        batch[stage.step :] = stage.batch
    length = per_sample = np.full(steps, sequence_length)
    if lengths is not None:
        length = np.array([lengths.length(step) for step in range(1, steps + 1)])
        per_sample = np.array([lengths.tokens_in(1, step) for step in range(1, steps + 1)])
    return np.stack([np.ones_like(batch), batch, batch * per_sample]), length


def _scheduled(features: list[Callback], used: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where the schedule stands after each iteration: it does not count those over which it is held."""
    skip = _find(features, ScriptedSkip)
    counts = True if skip is None else [not skip.holds(step) for step in range(1, used.shape[1] + 1)]
    return np.cumsum(used * counts, axis=1)


def _marks(counters: np.ndarray[Any, Any]) -> Iterator[Mark]:
    """One after the other: to keep them would have the garbage collector walk them all, again and again."""
    return map(Mark, *counters.tolist())


def _clips(clip: GradClip | None, counters: np.ndarray[Any, Any]) -> list[float | None]:
    """The largest norm in the steps that open at these counters, (3, steps)."""
    if clip is not None and (clip.stages or clip.overriding is not None):
        return [clip.cap(mark) for mark in _marks(counters)]
    return [None if clip is None else clip.cap(_START)] * counters.shape[1]


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
        self.reach(_START)

    def begin_at(self, counters: np.ndarray[Any, Any]) -> list[int]:
        """At which of these counters, (3, steps), something may begin, ascending; between them nothing does."""
        begins = {0, self._resumed_at - 1}
        if self._reset is not None and self._reset.start is not None:
            begins.add(next((n for n, mark in enumerate(_marks(counters)) if self._reset.is_due(mark)), 0))
        return sorted(n for n in begins if 0 <= n < counters.shape[1])

    def reach(self, mark: Mark) -> None:
        """Begin what begins when a step opens at these counters."""
        resumes = mark.steps == self._resumed_at
        if self._override is not None and (resumes or mark == _START):
            self._override.begin(mark if resumes else None, [self._peak])
        reset = self._reset
        # Without a start a reset waits for a resume, and a run that begins has nothing to reset.
        if reset is not None and reset.is_due(mark) and (reset.start is not None or (resumes and mark.steps)):
            reset.done = mark

    def values(self, key: str, counters: np.ndarray[Any, Any], values: list[float]) -> list[float]:
        """The values of the steps that open at these counters, (3, steps)."""
        if key not in self._keys:
            return values
        return [float(self._effective.effective(key, *both, 0)) for both in zip(_marks(counters), values, strict=True)]


def write_trace(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as CSV with a header; numbers in full, so that they compare equal to those of a run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)


def _find(features: Iterable[Callback], kind: type[_Feature]) -> _Feature | None:
    return next((feature for feature in features if isinstance(feature, kind)), None)
