"""The rungs of the recovery ladder: as a recipe writes them, and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, cast

from .base import MisconfigurationException

Do = Literal["wait", "skip", "lr", "rewind", "stop"]


class RungOptions(TypedDict, total=False):
    """One rung as a plain mapping. ``do`` must be given; what each of the others means stands in :class:`Rung`."""

    do: Do
    steps: int
    within: float
    max_times: int | None
    skip_steps: int
    factor: float
    cooldown: int
    floor: float
    to: int | None
    drop: bool
    before: int
    after: int
    reshuffle: bool
    weight_decay: float | None
    dropout: float | None
    clip: float | None
    reset_optimizer: bool


@dataclass(frozen=True)
class Rung:
    """What to do, how long to watch whether it helps, and how often it may be done."""

    do: Do
    """``wait``: nothing. ``skip``: the next ``skip_steps`` steps change nothing. ``lr``: the learning rate times
    ``factor`` from here on. ``rewind``: to an earlier checkpoint, past the data. ``stop``: end the run."""
    steps: int = 100
    """Optimizer steps within which the loss must be back, or the next rung follows; >= 5."""
    within: float = 3.0
    """Back is: the last five losses are finite, and their median is at most so many robust standard deviations above
    the level before the trouble; >= 0."""
    max_times: int | None = 10
    """How often in the life of a run; then it is passed over. ``None``: without limit."""
    skip_steps: int = 10
    """``skip``: optimizer steps whose data are passed over, >= 1."""
    factor: float = 1.0
    """``lr`` and ``rewind``: multiplies the learning rate of every later step, in (0, 1]; below 1 on an ``lr``."""
    cooldown: int = 100
    """``lr``: steps after a cut within which there is no other."""
    floor: float = 0.1
    """``lr``: all cuts together go no lower than this fraction; a rung at the floor is passed over."""
    to: int | None = None
    """``rewind``: to the checkpoint of this step; ``None``: to the last healthy one."""
    drop: bool = True
    """``rewind``: whether the offending window of data leaves the run, for good."""
    before: int = 100
    """``rewind``: optimizer steps before the first bad one whose data belong to that window, >= 0."""
    after: int = 100
    """``rewind``: steps after the last one that was taken, likewise. PaLM left out 200 to 500 batches in all."""
    reshuffle: bool = False
    """``rewind``: whether what is still to be read comes in another order, nothing of it twice."""
    weight_decay: float | None = None
    """``rewind``: weight decay from here on, of the groups that decay, >= 0."""
    dropout: float | None = None
    """``rewind``: rate of every dropout module from here on, in [0, 1)."""
    clip: float | None = None
    """``rewind``: largest gradient norm from here on, > 0; below ``GradClip``'s own."""
    reset_optimizer: bool = False
    """``rewind``: whether moments and step counts begin at zero."""

    @property
    def limit(self) -> float:
        """``max_times`` as a number."""
        return math.inf if self.max_times is None else self.max_times


#: Options that mean something on each kind of rung, beside ``do``.
_BELONG = {
    "wait": {"steps", "within", "max_times"},
    "skip": {"steps", "within", "max_times", "skip_steps"},
    "lr": {"steps", "within", "max_times", "factor", "cooldown", "floor"},
    "rewind": {
        *("steps", "within", "max_times", "factor", "to", "drop", "before", "after"),
        *("reshuffle", "weight_decay", "dropout", "clip", "reset_optimizer"),
    },
    "stop": set[str](),
}

#: Wait for a return; then a lower rate (by a tenth, as OPT-175B); then at most three rewinds; then the end.
DEFAULT_RUNGS: list[RungOptions] = [
    {"do": "wait", "steps": 100, "max_times": None},
    {"do": "lr", "factor": 0.9, "max_times": 5},
    {"do": "rewind", "max_times": 3},
    {"do": "stop"},
]
#: Where each kind of event begins; a kind that is not named begins nowhere.
DEFAULT_TRIGGERS: dict[str, str | int] = {
    "spike": "wait",
    "slow_divergence": "lr",
    "not_finite": "rewind",
    "loss_scale_collapse": "rewind",
    "too_many_skips": "rewind",
}


def standard_triggers(rungs: Sequence[Rung]) -> dict[str, str | int]:
    """The default triggers; where a rung is not there, at the next one that is."""
    order = ["wait", "skip", "lr", "rewind", "stop"]
    present = [rung.do for rung in rungs]
    found: dict[str, str | int] = {}
    for kind, where in DEFAULT_TRIGGERS.items():
        there = [do for do in order[order.index(str(where)) :] if do in present]
        found[kind] = there[0] if there else present[-1]
    return found


def check_rungs(rungs: Sequence[Mapping[str, Any]], triggers: Mapping[str, str | int]) -> tuple[list[Rung], list[str]]:
    """The rungs, and what is wrong with them or with the triggers, one phrase each."""
    checked: list[Rung] = []
    problems = [] if rungs else ["rungs=[]: does nothing; give at least one rung."]
    for place, options in enumerate(rungs, 1):
        found = _problems(options)
        problems += [f"rung {place}: {problem}" for problem in found]
        if not found:
            checked.append(Rung(**options))
    if any(options.get("do") == "stop" for options in rungs[:-1]):
        problems.append("stop: ends the run, so that no rung may follow it.")
    if len(checked) == len(rungs):
        problems += [
            f"triggers {kind}={where!r}: names no rung; give one of {', '.join(r.do for r in checked)}, or its place"
            f" from 1 to {len(checked)}."
            for kind, where in triggers.items()
            if place_of(where, checked) is None
        ]
    return checked, problems


def place_of(where: str | int, rungs: Sequence[Rung]) -> int | None:
    """Index of the rung that a trigger names: its place, counted from 1, or the first that does it."""
    if isinstance(where, int) or where.isdigit():
        return int(where) - 1 if 1 <= int(where) <= len(rungs) else None
    return next((index for index, rung in enumerate(rungs) if rung.do == where), None)


def check(
    rungs: Sequence[Mapping[str, Any]], triggers: Mapping[str, str | int], others: Sequence[str] = ()
) -> list[Rung]:
    """The rungs.

    Args:
        rungs: As a recipe writes them.
        triggers: Kind of event -> rung.
        others: Sentences about other arguments, told together with what is wrong here.

    Raises:
        MisconfigurationException: with everything that is wrong.
    """
    checked, problems = check_rungs(rungs, triggers)
    if problems or others:
        raise MisconfigurationException("\n".join([*(f"`Recovery`: {problem}" for problem in problems), *others]))
    return checked


def _problems(options: Mapping[str, Any]) -> list[str]:
    do = options.get("do")
    if do not in _BELONG:
        return [f"do={do!r}: must be one of {', '.join(_BELONG)}."]
    known = {f.name for f in fields(Rung)}
    found = [f"{name}: is no option; the options of a {do} are {_listed(do)}." for name in options if name not in known]
    found += [
        f"{name}={options[name]}: means nothing on a {do}; its options are {_listed(do)}."
        for name in options
        if name in known - {"do"} - _BELONG[cast(str, do)]
    ]
    return found or _out_of_range(Rung(**options))


def _listed(do: Any) -> str:
    return ", ".join(sorted(_BELONG[do])) or "none"


def _out_of_range(rung: Rung) -> list[str]:
    rules: list[tuple[str, bool, str]] = [
        ("steps", rung.steps >= 5, "at least 5, since the median of five losses is compared"),
        ("within", rung.within >= 0, "0 or more"),
        ("max_times", rung.limit >= 1, "at least 1, or null for no limit"),
        ("skip_steps", rung.skip_steps >= 1, "at least 1"),
        ("factor", 0 < rung.factor <= 1, "above 0 and at most 1"),
        ("cooldown", rung.cooldown >= 0, "0 or more"),
        ("floor", 0 <= rung.floor <= 1, "from 0 to 1"),
        ("to", rung.to is None or rung.to >= 0, "0 or more, or null for the last healthy one"),
        ("before", rung.before >= 0, "0 or more"),
        ("after", rung.after >= 0, "0 or more"),
        ("weight_decay", rung.weight_decay is None or rung.weight_decay >= 0, "0 or more"),
        ("dropout", rung.dropout is None or 0 <= rung.dropout < 1, "at least 0 and below 1"),
        ("clip", rung.clip is None or rung.clip > 0, "above 0"),
    ]
    found = [f"{name}={getattr(rung, name)}: must be {rule}." for name, holds, rule in rules if not holds]
    if rung.do == "lr" and rung.factor >= 1:
        found.append(f"factor={rung.factor}: cuts nothing; give one below 1, as 0.9.")
    if rung.do == "rewind" and rung.max_times is None:
        found.append("max_times=null: a run that rewinds without limit may never end; give a number.")
    return found
