"""The global batch as a pure function of consumed samples, and its inverse: samples before any step.

A schedule is a list of stages. A stage holds from a *mark* in consumed samples on; a window that begins at or behind
the mark has the stage's batch. So the stage of a step is a function of what was committed before it and of nothing
else, and a resume needs no state. Lengths in steps are turned into marks once, when the schedule is built.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, cast

from .stages import StageLength, parse_count, parse_stages, stages_from_list

Ramp = list[int] | list[dict[str, int | str]] | str  # text last: a parser takes the first that fits

_DOUBLING = re.compile(r"(?P<start>\S+)\s+doubling\s+at\s+(?P<marks>.+?)\s+(?P<unit>steps|samples|tokens)")


class Stage(NamedTuple):
    """One batch size. ``step`` and ``samples``: what an uninterrupted run has committed when the stage begins."""

    batch: int
    mark: int
    step: int
    samples: int


class BatchSchedule:
    """Stages laid out over a run.

    Args:
        lengths: (batch, length) per stage. A length is an int of steps, a Fraction of samples, or None for the last
            stage. Lengths in samples add up exactly: a stage that runs over its mark by a part of a window shortens
            the next, so that marks do not drift.
    """

    def __init__(self, lengths: Sequence[tuple[int, int | Fraction | None]]) -> None:
        stages: list[Stage] = []
        mark, step, samples = Fraction(0), 0, 0
        for batch, length in lengths:
            stages.append(Stage(batch, math.ceil(mark), step, samples))
            if length is None:
                break
            mark = Fraction(samples + batch * length) if isinstance(length, int) else mark + length
            steps = max(0, math.ceil((mark - samples) / batch))  # 0: the stage before ran over this one's end
            step, samples = step + steps, samples + steps * batch
        self.stages = tuple(stages)
        self._marks = [stage.mark for stage in stages]
        self._steps = [stage.step for stage in stages]
        self._samples = [stage.samples for stage in stages]

    def batch(self, consumed: int) -> int:
        """Samples of the window that opens when ``consumed`` are committed."""
        return self.stages[bisect_right(self._marks, consumed) - 1].batch

    def samples_before(self, step: int) -> int:
        """Samples committed before optimizer step ``step``, counted from 1."""
        stage = self.stages[bisect_right(self._steps, step - 1) - 1]
        return stage.samples + (step - 1 - stage.step) * stage.batch

    def samples_after(self, consumed: int, steps: int) -> int:
        """Samples committed ``steps`` windows after ``consumed``, also where an uninterrupted run never stands."""
        for stage, end in zip(self.stages, [*self._marks[1:], math.inf], strict=True):
            if consumed < end:
                windows = min(steps, math.ceil((end - consumed) / stage.batch)) if end < math.inf else steps
                consumed, steps = consumed + windows * stage.batch, steps - windows
        return consumed

    def steps_in(self, samples: int) -> int:
        """Whole optimizer steps that ``samples`` suffice for: a horizon in samples as one in steps."""
        stage = self.stages[bisect_right(self._samples, samples) - 1]
        return stage.step + (samples - stage.samples) // stage.batch

    def reached(self, consumed: int = 0) -> list[Stage]:
        """The stage that a run with so many samples is in, and those to come; none that the ramp jumps over."""
        now = bisect_right(self._marks, consumed) - 1
        used = [bisect_right(self._steps, stage.step) - 1 == i for i, stage in enumerate(self.stages)]
        return [stage for i, stage in enumerate(self.stages) if i == now or (i > now and used[i])]


def build_schedule(ramp: Ramp, full: int, tokens_per_sample: int | None = None) -> BatchSchedule:
    """Lay out a ramp that ends at the batch ``full``.

    Args:
        ramp: One of

            - ``"16 16 6_000_000"`` or ``[16, 16, 6000000]``: start, increment, samples, as Megatron-LM has it:
              ``start + increment * floor(consumed / (samples / n))`` with n = (full - start) / increment, and ``full``
              from ``samples`` on;
            - ``"1024 for 7200 steps then 2048"``, with any number of stages in steps, samples or tokens; the last may
              be left out and is ``full``;
            - the same as a list: ``[{"batch": 1024, "steps": 7200}, {"batch": 2048}]``;
            - ``"256 doubling at 168B, 337B tokens"``: marks from the start of the run, ascending.
        full: Samples per step at the end.
        tokens_per_sample: What lengths in tokens are divided by; needed for those only.

    Raises:
        ValueError: when the ramp cannot be read or does not end at ``full``.

    Example::

        >>> build_schedule("1024 for 7200 steps then 2048", full=2048).samples_before(7202)
        7374848
    """
    numbers = _three_numbers(ramp)
    if numbers is not None:
        return BatchSchedule(_increments(*numbers, full))
    if isinstance(ramp, str):
        doubling = _DOUBLING.fullmatch(ramp.strip())
        stages = _doublings(doubling) if doubling else parse_stages(ramp)
    else:
        stages = stages_from_list("batch", cast(list[Mapping[str, int | str]], ramp))
    if stages[-1].length is not None:
        stages = [*stages, StageLength(full)]
    if stages[-1].value != full:
        raise ValueError(f"ends at {stages[-1].value}: must end at the full global batch {full}.")
    return BatchSchedule([(stage.value, _length(stage, tokens_per_sample)) for stage in stages])


def _three_numbers(ramp: Ramp) -> tuple[int, int, int] | None:
    words = ramp.split() if isinstance(ramp, str) else ramp
    if any(isinstance(word, Mapping) for word in words) or (isinstance(ramp, str) and len(words) != 3):
        return None
    if len(words) != 3:
        raise ValueError(f"{ramp}: must be three numbers, start, increment and samples, or stages.")
    if "for" in words:  # `1024 for 7200`, with its unit forgotten
        raise ValueError("names no unit: write steps, samples or tokens behind the length, as 1024 for 7200 steps.")
    start, increment, samples = (parse_count(cast(int | str, word)) for word in words)
    return start, increment, samples


def _increments(start: int, increment: int, samples: int, full: int) -> list[tuple[int, int | Fraction | None]]:
    if min(start, increment, samples) < 1:
        raise ValueError("start, increment and samples: each must be at least 1.")
    span = full - start
    if span <= 0 or span % increment:
        legal = [n for n in range(1, max(span, 0) + 1) if span % n == 0]
        near = [*[n for n in legal if n < increment][-1:], *[n for n in legal if n > increment][:1]]
        remedy = f"nearest legal increments are {' and '.join(map(str, near))}" if near else f"start below {full}"
        raise ValueError(f"start {start} + a multiple of increment {increment}: must reach {full}; {remedy}.")
    n = span // increment
    return [(start + increment * k, Fraction(samples, n)) for k in range(n)] + [(full, None)]


def _doublings(match: re.Match[str]) -> list[StageLength]:
    batch = parse_count(match["start"])
    marks = [parse_count(mark) for mark in re.split(r"[\s,]+", match["marks"])]
    if batch < 1 or marks[0] < 1 or any(b <= a for a, b in pairwise(marks)):
        raise ValueError(f"marks {match['marks']}: must be above 0 and ascending, and the batch at least 1.")
    lengths = [b - a for a, b in pairwise([0, *marks])]
    stages = [StageLength(batch << k, length, match["unit"]) for k, length in enumerate(lengths)]
    return [*stages, StageLength(batch << len(marks))]


def _length(stage: StageLength, tokens_per_sample: int | None) -> int | Fraction | None:
    """A stage's length as :class:`BatchSchedule` takes it: int steps, Fraction samples."""
    if stage.length is None or stage.unit == "steps":
        return stage.length
    if stage.unit == "samples":
        return Fraction(stage.length)
    if tokens_per_sample is None:
        raise ValueError(f"{stage.length} tokens: tokens_per_sample must be given, to turn tokens into samples.")
    return Fraction(stage.length, tokens_per_sample)
