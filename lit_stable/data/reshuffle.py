"""Requests to shuffle what is left of the data: from steps or samples of a run to positions of the sample stream.

What lies behind the run is a fact and travels in its checkpoints; what lies ahead follows from the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lit_stable.callbacks.positions import Range, consumed_before, stream_position
from lit_stable.callbacks.stages import parse_count
from lit_stable.data.epochs import Reshuffle

_REWIND = "rewind"  # in place of a mark in the recipe
_MARK = re.compile(r"\s*(?P<count>\S+)\s+(?P<unit>steps|samples)\s*")


class Settled(NamedTuple):
    """A request with the stream position from which on it holds."""

    mark: str
    seed: int
    position: int


def parse_marks(requests: Mapping[str, int]) -> dict[tuple[int, str], int]:
    """Seed by (count, unit); every malformed request is reported in one ValueError.

    Example::

        >>> parse_marks({"115_500 steps": 7, "6M samples": 8})
        {(115500, 'steps'): 7, (6000000, 'samples'): 8}
    """
    marks: dict[tuple[int, str], int] = {}
    problems: list[str] = []
    for text, seed in requests.items():
        match = _MARK.fullmatch(str(text))
        try:
            if match is None or seed < 0:
                raise ValueError
            marks[parse_count(match["count"]), match["unit"]] = seed
        except ValueError:
            problems.append(
                f"data.order.reshuffle={{{text}: {seed}}}: must be a count of steps or samples and a seed of at least"
                " 0, as {115500 steps: 7}."
            )
    if problems:
        raise ValueError("\n".join(problems))
    return marks


def settle(
    requests: Mapping[str, int],
    known: Sequence[Settled],
    samples_before: Callable[[int], int],
    consumed: int,
    dropped: Sequence[Range],
    dropped_before: Sequence[Range] = (),
) -> list[Settled]:
    """Every reshuffle of a run, by position: those that it has passed, and those that the recipe asks for ahead of it.

    Args:
        requests: Seed by mark, as ``{115500 steps: 7}``: behind that step, or that many samples.
        known: As the checkpoint has them.
        samples_before: Samples committed before a step, counted from 1.
        consumed: Samples committed now.
        dropped: Ranges of stream positions that are left out, sorted and merged.
        dropped_before: Those of them that were, or would have been, chosen in the order that the run had so far.

    Raises:
        ValueError: when a request is malformed, speaks of a point that is passed and was not known there, or would
            bring back what was dropped before.
    """
    here = stream_position(consumed, dropped)
    settled = [reshuffle for reshuffle in known if reshuffle.position < here]
    passed = {(reshuffle.mark, reshuffle.seed) for reshuffle in settled}
    planned = {(reshuffle.mark, reshuffle.seed) for reshuffle in known}
    late: list[str] = []
    problems: list[str] = []
    for (count, unit), seed in parse_marks(requests).items():
        mark = f"{count} {unit}"
        if (mark, seed) in passed:
            continue
        samples = samples_before(count + 1) if unit == "steps" else count
        if samples < consumed:
            late.append(f"{{{mark}: {seed}}}")
        position = stream_position(samples, dropped)
        settled.append(Settled(mark, seed, position))
        ahead = [(start, stop) for start, stop in dropped_before if start >= position]
        if ahead and (mark, seed) not in planned:
            start, stop = ahead[-1]
            problems.append(
                f"data.order.reshuffle={{{mark}: {seed}}}: lies before stream positions {start} to {stop - 1}, which"
                " are left out; in another order other samples would stand there, and those would come back: give a"
                f" point behind them, {consumed_before(start, dropped)} samples or later."
            )
    if late:
        problems.insert(
            0,
            f"data.order.reshuffle={', '.join(late)}: is behind the run, which read those data in another order; give a"
            " later point, or resume from an earlier checkpoint.",
        )
    if problems:
        raise ValueError("\n".join(problems))
    return sorted(settled, key=lambda reshuffle: reshuffle.position)


def with_rewinds(settled: Sequence[Settled], rewinds: Sequence[tuple[int, int]]) -> list[Settled]:
    """Those of the recipe, and those that rewinds asked for as (position, seed), each once, by position."""
    own = [Settled(_REWIND, seed, position) for position, seed in rewinds]
    others = [reshuffle for reshuffle in settled if reshuffle.mark != _REWIND]
    return sorted([*others, *own], key=lambda reshuffle: reshuffle.position)


def as_reshuffles(settled: Sequence[Settled]) -> list[Reshuffle]:
    """What the mixture takes."""
    return [Reshuffle(reshuffle.position, reshuffle.seed) for reshuffle in settled]
