"""The arithmetic of batch sizes: global batch = micro-batch x data-parallel ranks x accumulation."""

from __future__ import annotations

import math
from typing import Any

_MOST = 100_000_000  # samples; ten milliard steps of so many are a number of 64 bits


def batch_size_problems(micro_batch: int, global_batch: int, ranks: int = 1) -> list[str]:
    """What keeps ``global_batch`` samples from being cut into micro-batches on ``ranks`` ranks, with the remedy.

    Example::

        >>> batch_size_problems(micro_batch=6, global_batch=32)
        ['data.micro_batch=6: must divide data.global_batch=32; nearest legal values are 4 and 8.']
        >>> batch_size_problems(micro_batch=4, global_batch=32, ranks=2)
        []
    """
    sizes = {"micro_batch": micro_batch, "global_batch": global_batch}
    problems = [f"data.{name}={value}: must be at least 1." for name, value in sizes.items() if value < 1]
    problems += [f"data.{name}={value}: must be at most {_MOST:,}." for name, value in sizes.items() if value > _MOST]
    if problems:
        return problems
    if global_batch % micro_batch:
        lower = [size for size in range(1, math.isqrt(global_batch) + 1) if global_batch % size == 0]
        divisors = sorted({*lower, *(global_batch // size for size in lower)})
        return [
            f"data.micro_batch={micro_batch}: must divide data.global_batch={global_batch}; "
            f"{_nearest(micro_batch, divisors)}."
        ]
    per_pass = micro_batch * ranks
    if global_batch % per_pass:
        below = global_batch - global_batch % per_pass
        multiples = [size for size in (below, below + per_pass) if size > 0]
        return [
            f"data.global_batch={global_batch}: must be a multiple of data.micro_batch={micro_batch} x {ranks} "
            f"data-parallel ranks = {per_pass}; {_nearest(global_batch, multiples)}."
        ]
    return []


def ramp_of(trainer: Any) -> Any:
    """The trainer's callback that changes the global batch, known by what it can do; None: there is none."""
    callbacks = [] if trainer is None else trainer.callbacks
    return next((callback for callback in callbacks if hasattr(callback, "samples_before")), None)


def samples_before(step: int, steps: int, samples: int, global_batch: int, ramp: Any) -> int:
    """Samples committed before step ``step``, counted from 1, of a run that consumed ``samples`` in ``steps``.

    Ahead of it the batch is that of the ramp at each sample count, or ``global_batch``. Behind it is what would have
    led there: exact for a run whose batch was always given so.
    """
    ahead = step - 1 - steps
    if ramp is None:
        return samples + ahead * global_batch
    if ahead >= 0:
        return int(ramp.samples_after(samples, ahead))
    return int(ramp.samples_before(step) - ramp.samples_before(steps + 1)) + samples


def _nearest(value: int, legal: list[int]) -> str:
    below = [size for size in legal if size < value][-1:]
    above = [size for size in legal if size > value][:1]
    near = below + above
    if len(near) == 1:
        return f"nearest legal value is {near[0]}"
    return f"nearest legal values are {near[0]} and {near[1]}"
