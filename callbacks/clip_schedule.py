"""A largest gradient norm that changes at marks of progress."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .base import MisconfigurationException

#: One stage, a plain mapping: from this progress on, the largest norm is this. (``from`` is no name for a class field.)
ClipStage = TypedDict("ClipStage", {"from": int, "max_norm": float})


def check_stages(stages: Sequence[Mapping[str, Any]], before: float | None) -> list[tuple[int, float]]:
    """Stages as (first progress, largest norm), the norm that holds ``before`` the first stage put in front.

    Raises:
        MisconfigurationException: with everything that is wrong: keys, values, order, or a ``before`` that is missing
            or would never hold.
    """
    problems = [
        f"schedule[{index}]={dict(stage)}: must have exactly the keys from and max_norm."
        for index, stage in enumerate(stages)
        if set(stage) != {"from", "max_norm"}
    ]
    if not stages:
        problems.append("schedule=[]: must have at least one stage; leave it out for a constant max_norm.")
    if problems:
        raise MisconfigurationException("\n".join(f"`GradClip`: {problem}" for problem in problems))
    starts = [stage["from"] for stage in stages]
    norms = [stage["max_norm"] for stage in stages]
    if wrong := [norm for norm in norms if not (norm > 0 and math.isfinite(norm))]:
        problems.append(f"schedule has max_norm={wrong[0]}: must be a finite number > 0.")
    if starts[0] < 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        problems.append(f"schedule has from={starts}: must be 0 or more and increase from stage to stage.")
    elif starts[0] > 0 and before is None:
        problems.append(f"schedule begins at {starts[0]}: give max_norm for what comes before, or a stage from 0.")
    elif starts[0] == 0 and before is not None:
        problems.append(
            f"max_norm={before}: would never hold, since schedule begins at 0; delete max_norm (or set it to null)."
        )
    if problems:
        raise MisconfigurationException("\n".join(f"`GradClip`: {problem}" for problem in problems))
    first = [] if before is None else [(0, before)]
    return first + list(zip(starts, norms, strict=True))


def norm_at(stages: Sequence[tuple[int, float]], progress: int) -> float:
    """The largest norm in force at a progress; ``stages`` as (first progress, norm), sorted, beginning at 0.

    Example::

        >>> [norm_at([(0, 2.5), (10, 1.5)], progress) for progress in (0, 9, 10)]
        [2.5, 2.5, 1.5]
    """
    return [norm for start, norm in stages if start <= progress][-1]
