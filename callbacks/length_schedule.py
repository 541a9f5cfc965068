"""The sequence length as a pure function of the optimizer step."""

from __future__ import annotations

import math
from bisect import bisect_right

from .stages import StageLength, parse_stages

SHAPES = ("linear", "root")


class LengthSchedule:
    """From ``shortest`` to ``longest`` over ``total`` steps, rounded down to a multiple; in integers throughout.

    ``linear``: shortest + (longest - shortest) * step / total. ``root``: the same with the square root of step / total,
    which is long sooner. Steps count from 1, as in DeepSpeed's curriculum (``fixed_linear``, ``fixed_root`` of degree
    2); from step ``total`` on the length is ``longest``.

    Raises:
        ValueError: when the numbers make no schedule; the nearest that do are named.

    Example::

        >>> lengths = LengthSchedule("linear", shortest=64, longest=2048, total=36_000, multiple_of=8)
        >>> [lengths.at(step) for step in (145, 146, 1831, 15_000, 18_000, 36_000)]
        [64, 72, 160, 888, 1056, 2048]
    """

    def __init__(self, shape: str, shortest: int, longest: int, total: int, multiple_of: int = 1) -> None:
        if shape not in SHAPES:
            raise ValueError(f"shape={shape!r}: must be one of {', '.join(SHAPES)}.")
        for name, value in (("min_length", shortest), ("total_steps", total), ("multiple_of", multiple_of)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1.")
        if shortest >= longest:
            raise ValueError(f"min_length={shortest}: must be below the full length {longest}.")
        if below := shortest % multiple_of:
            near = [n for n in (shortest - below, shortest - below + multiple_of) if 0 < n < longest]
            raise ValueError(
                f"min_length={shortest}: must be a multiple of multiple_of={multiple_of}; nearest legal values are"
                f" {' and '.join(map(str, near))}."
            )
        self.shape = shape
        self.shortest = shortest
        self.longest = longest
        self.total = total
        self.multiple_of = multiple_of

    def at(self, step: int) -> int:
        """Length of optimizer step ``step``, counted from 1."""
        if step >= self.total:
            return self.longest
        span = self.longest - self.shortest
        # floor(span * sqrt(step / total)) and floor(span * step / total), without floating point
        grown = math.isqrt(span * span * step // self.total) if self.shape == "root" else span * step // self.total
        return (self.shortest + grown) // self.multiple_of * self.multiple_of

    def distinct(self) -> list[int]:
        """All lengths of the warm-up, ascending."""
        return sorted({self.at(step) for step in range(1, self.total + 1)})


class LengthStages:
    """Lengths in stages: ``"64 for 1000 steps then 512 for 2000 steps then 2048"``; the last is the full length.

    Raises:
        ValueError: when a stage counts other things than steps, is longer than the full length, or the last is not it.

    Example::

        >>> stages = LengthStages("64 for 1000 steps then 512 for 2000 steps", longest=2048)
        >>> [stages.at(step) for step in (1, 1000, 1001, 3000, 3001)]
        [64, 64, 512, 512, 2048]
    """

    def __init__(self, text: str, longest: int) -> None:
        stages = parse_stages(text)
        if stages[-1].length is not None:
            stages = [*stages, StageLength(longest)]
        for stage in stages:
            if stage.unit != "steps":
                raise ValueError(f"{stage.length} {stage.unit}: stages of a length are counted in steps.")
            if stage.value > longest:
                raise ValueError(f"stage {stage.value}: must be at most the full length {longest}.")
        if stages[-1].value != longest:
            raise ValueError(f"ends at {stages[-1].value}: must end at the full length {longest}.")
        self.longest = longest
        self._lengths = [stage.value for stage in stages]
        self._ends = [0]
        for stage in stages[:-1]:
            self._ends.append(self._ends[-1] + (stage.length or 0))

    def at(self, step: int) -> int:
        """Length of optimizer step ``step``, counted from 1."""
        return self._lengths[bisect_right(self._ends, step - 1) - 1]

    def distinct(self) -> list[int]:
        """All lengths, ascending."""
        return sorted(set(self._lengths))
