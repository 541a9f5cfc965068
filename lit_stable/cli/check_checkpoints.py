"""What `lit-stable check` says of checkpoints: when they are written, how many will stay, and how large they are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from lit_stable.callbacks import Recovery
from lit_stable.callbacks.cadence import Cadence, Every, parse_cadence
from lit_stable.cli.trace import Trace
from lit_stable.optim.schedule import LRSchedule
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.console import human_bytes
from lit_stable.run.milestones import milestones


def cadences(validate_every: Every, checkpoints: Checkpoints, trace: Trace | None) -> str:
    """A line: how often the run validates and saves, and where its end is known how many times that will be.

    Args:
        validate_every: As in the recipe.
        checkpoints: When to save.
        trace: Of the run; None where it has no end.
    """
    times = [
        f"{what} every {every}{_times(every, trace) if trace else ''}"
        for what, every in (("validation", parse_cadence(validate_every)), ("a checkpoint", checkpoints.every))
    ]
    return ", ".join(times)


def _times(every: Cadence, trace: Trace) -> str:
    """How many windows come to, or over, a multiple: `Cadence.is_due` of all of them."""
    counted = {"steps": trace.iteration, "samples": trace.samples, "tokens": trace.tokens}[every.unit]
    times = np.count_nonzero(np.diff(counted // every.number, prepend=0))
    return f" ({times:,} times)"


def retention(
    checkpoints: Checkpoints, schedule: LRSchedule, features: Collection[Any], steps: int, size: float
) -> str:
    """A line: the most checkpoints that lie in the run's folder at its end, by why they stay, and their bytes.

    Apart from them, what rewinds leave behind: those of a branch that is left stay, and no count of theirs is kept.

    Args:
        checkpoints: When to save and what to keep.
        schedule: Has the end of the warm-up.
        features: The active features.
        steps: Of the whole run; below 1: not known.
        size: Bytes of one checkpoint.
    """
    kept = {"last": checkpoints.keep_last, "best": int(checkpoints.keep_best)}
    if checkpoints.keep_every is not None and steps > 0:
        kept[f"every {checkpoints.keep_every:,} steps"] = steps // checkpoints.keep_every
    if checkpoints.milestones:
        kept["milestones"] = len(milestones(schedule, features))
    kept["healthy"] = sum(_to_go_back_to(feature) for feature in features if isinstance(feature, Recovery))
    total = sum(kept.values())
    parts = ", ".join(f"{why} {count}" for why, count in kept.items() if count)
    mirrored = "" if checkpoints.mirror is None else f"; all of them in {checkpoints.mirror}"
    return (
        f"checkpoints kept: at most {total} ({parts}), {human_bytes(size)} each, {human_bytes(total * size)}"
        f" together{mirrored}{_left_behind(features, total - 1, size)}"
    )


def _left_behind(features: Collection[Any], most: int, size: float) -> str:
    """By rewinds, of which each leaves what stood behind its target: ``most`` at a time."""
    rungs = [rung for one in features if isinstance(one, Recovery) and one.acts for rung in one.rungs]
    times = sum(rung.limit for rung in rungs if rung.do == "rewind")
    if not times or not most:
        return ""
    return (
        f"; up to {times:.0f} rewinds leave up to {most} more each, as NAME.branch-N, "
        f"{human_bytes(times * most * size)} together"
    )


def _to_go_back_to(recovery: Recovery) -> int:
    """How many the ladder keeps: its newest healthy ones, and those of steps that a rung names."""
    rewinds = [rung for rung in recovery.rungs if rung.do == "rewind"]
    return recovery.keep + len({rung.to for rung in rewinds} - {None}) if rewinds else 0
