"""Which data each optimizer step of a run has read: a few numbers, since batches are as large as the one before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from .positions import Range, stream_position


class BatchHistory:
    """Samples committed before any optimizer step, past or to come.

    Steps that read as many samples as the one before are one segment. What is to come reads as many as the last step
    did, or as ``planned`` says.
    """

    def __init__(self) -> None:
        self._segments: list[list[int]] = []  # [first step, samples before it, samples in each of its steps]

    def note(self, step: int, before: int, batch: int) -> None:
        """Take in a step, counted from 1, that has just been committed."""
        self._segments = [s for s in self._segments if s[0] < step]
        if not self._segments or self._segments[-1][2] != batch or self._known(step) != before:
            self._segments.append([step, before, batch])

    def samples_before(self, step: int) -> int:
        """Samples committed before a step; before the first one known, what was committed there."""
        return max(self._known(step), self._segments[0][1]) if self._segments else 0

    def _known(self, step: int) -> int:
        first, before, batch = self._segments[max(0, bisect_right([s[0] for s in self._segments], step) - 1)]
        return before + (step - first) * batch

    def window(
        self,
        first: int,
        last: int,
        taken: int,
        dropped: Sequence[Range],
        planned: Callable[[int], int] | None = None,
    ) -> Range:
        """The stretch of the stream that steps ``first`` to ``last`` read, whole global batches.

        Args:
            first: Counted from 1.
            last: Included; may lie in the future.
            taken: The last step that was taken.
            dropped: What the run leaves out already.
            planned: Samples committed before a step that is to come.
        """
        stop = self.samples_before(last + 1)
        if planned is not None and last > taken:
            stop = self.samples_before(taken + 1) + planned(last + 1) - planned(taken + 1)
        return stream_position(self.samples_before(first), dropped), stream_position(stop - 1, dropped) + 1

    def state_dict(self) -> list[list[int]]:
        """Plain lists."""
        return [list(segment) for segment in self._segments]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        """Restore."""
        self._segments = [[int(n) for n in segment] for segment in state]


def planned_samples(callbacks: Sequence[Any]) -> Callable[[int], int] | None:
    """What a callback that changes the global batch says of steps to come, known by what it can do."""
    ramp = next((c for c in callbacks if hasattr(c, "samples_before")), None)
    return None if ramp is None else ramp.samples_before
