"""The learning rate as a pure function of progress.

The rate of a step depends on the recipe and on what was committed before that step, and on nothing else: it has no
counter of its own, nothing to save or restore, and any point of a run can be evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.progress import Mark
from lit_stable.callbacks.stages import Count, parse_count

Shape = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
Unit = Literal["steps", "samples", "tokens"]
OnConflict = Literal["error", "override", "checkpoint"]

_LENGTHS = ("warmup", "horizon", "cooldown")
_FRACTION = re.compile(r"0?\.\d*[1-9]\d*")  # of text: the command line hands over "0.2", a recipe 0.2


@judges_arguments(ValueError, "schedule")
@dataclass(frozen=True)
class LRSchedule:
    """Warm-up to ``peak``, then ``shape`` down to ``floor`` at ``horizon``.

    All lengths are counted in ``unit`` from the start of the run, warm-up included, as Megatron-LM counts them (but see
    ``warmup_unit``): the decayed fraction at n is (n - warmup) / (horizon - warmup).

    - ``cosine``: half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, one cycle).
    - ``linear``: a straight line.
    - ``constant``: stays at ``peak``; takes neither ``horizon`` nor ``floor``.
    - ``wsd``: stays at ``peak``, then a straight line over the last ``cooldown`` (Hu et al. 2024, arXiv:2404.06395).
    - ``inverse_sqrt``: peak * sqrt(warmup / n), never below ``floor`` (Vaswani et al. 2017, arXiv:1706.03762, eq. 3).

    Raises:
        ValueError: naming every field that is wrong, one line each.

    Example::

        >>> LRSchedule(peak=6e-5, floor=6e-6, warmup=1800, horizon="20k").lr(900)
        3e-05
    """

    peak: float
    """Highest learning rate, > 0."""

    shape: Shape = "cosine"
    """How the rate falls after the warm-up."""

    unit: Unit = "steps"
    """What the lengths count: optimizer steps, samples (sequences) or tokens."""

    warmup: Count = 0
    """Length of the linear rise from 0; above 0, the first step has rate 0."""

    warmup_unit: Unit | None = None
    """What ``warmup`` counts; null: ``unit``. With another one the decay begins at 0 of ``unit``, since nothing
    here tells where the warm-up ends in it: samples beside tokens, as Megatron-LM has it where sequences grow."""

    horizon: Count | None = None
    """End of the decay, counted from 0; the rate is ``floor`` from there on."""

    floor: float = 0.0
    """Lowest rate after the warm-up, between 0 and ``peak``."""

    cooldown: Count | float | None = None
    """For ``wsd`` only: length of the final decay, as a budget or as a fraction of ``horizon`` between 0 and 1."""

    on_conflict: OnConflict = "error"
    """On resume, when the checkpoint was trained with another schedule: refuse, use this one, or use that one."""

    def __post_init__(self) -> None:
        # The lengths can be compared only where each can be read.
        problems = _value_problems(self) + (_unreadable_lengths(self) or _length_problems(self))
        if problems:
            raise ValueError("\n".join(problems))

    @cached_property
    def warmup_end(self) -> int:
        """First progress at which the rate is ``peak``, in ``unit``, or in ``warmup_unit``."""
        return parse_count(self.warmup)

    @property
    def mixes_units(self) -> bool:
        """Whether warm-up and decay are counted in different units."""
        return self.warmup_unit not in (None, self.unit)

    def describe_units(self) -> str:
        """What it counts, and what the warm-up counts where that is something else."""
        return self.unit + (f", warm-up {self.warmup_end:,} {self.warmup_unit}" if self.mixes_units else "")

    @cached_property
    def decay_end(self) -> int | None:
        """First progress at which the rate is ``floor``, in ``unit``; None where the decay has no end."""
        return None if self.horizon is None else parse_count(self.horizon)

    @cached_property
    def decay_start(self) -> int:
        """Last progress at which the rate is ``peak``, in ``unit``."""
        if self.cooldown is None or self.decay_end is None:
            return 0 if self.mixes_units else self.warmup_end
        length = _canonical("cooldown", self.cooldown)
        return self.decay_end - (round(length * self.decay_end) if isinstance(length, float) else length)

    def rate(self, committed: Mark) -> float:
        """Learning rate of the step that starts when that much is committed."""
        progress: int = getattr(committed, self.unit)
        if not self.mixes_units:
            return self.lr(progress)
        risen: int = getattr(committed, self.warmup_unit or self.unit)
        return self.peak * risen / self.warmup_end if risen < self.warmup_end else self.lr(progress)

    def lr(self, progress: int) -> float:
        """The same by progress in ``unit`` alone; without the warm-up, where that counts something else."""
        if progress < self.warmup_end and not self.mixes_units:
            return self.peak * progress / self.warmup_end
        if self.decay_end is not None and progress >= self.decay_end:
            return self.floor
        if self.shape == "constant" or progress <= self.decay_start:
            return self.peak
        if self.shape == "inverse_sqrt":
            return max(self.floor, self.peak * math.sqrt(self.warmup_end / progress))
        assert self.decay_end is not None
        decayed = (progress - self.decay_start) / (self.decay_end - self.decay_start)
        left = 0.5 * (1.0 + math.cos(math.pi * decayed)) if self.shape == "cosine" else 1.0 - decayed
        return self.floor + (self.peak - self.floor) * left

    def milestones(self) -> list[tuple[int, float, str]]:
        """The points worth reading before a run: (progress in ``unit``, rate, what happens there)."""
        points = [(0, "start")]
        if self.warmup_end > 0 and not self.mixes_units:
            points.append((self.warmup_end, "warm-up ends"))
        if self.shape == "wsd":
            points.append((self.decay_start, "cooldown starts"))
        if self.decay_end is not None:
            points.append(((self.decay_start + self.decay_end) // 2, "half-way through the decay"))
            points.append((self.decay_end, "decay ends"))
        return [(progress, self.lr(progress), label) for progress, label in points]

    def differences(self, other: LRSchedule) -> list[tuple[str, Any, Any]]:
        """Fields in which ``other`` differs: (name, value here, value there).

        ``on_conflict`` does not count, and neither does another spelling of the same length, as 375M for 375_000_000.
        """
        compared = [field.name for field in fields(self) if field.name != "on_conflict"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in compared]
        return [(name, here, there) for name, here, there in pairs if _canonical(name, here) != _canonical(name, there)]


def format_lr(lr: float) -> str:
    """A rate with 7 significant digits, enough to tell 5.9986e-05 from 6e-05.

    Example::

        >>> format_lr(5.998591234e-05)
        '5.998591e-05'
    """
    return f"{lr:.7g}"


def resolve_conflict(current: LRSchedule, stored: Mapping[str, Any]) -> tuple[LRSchedule, list[str]]:
    """Decide which schedule a resumed run follows, by ``current.on_conflict``.

    Args:
        current: the schedule of the recipe.
        stored: the fields of the checkpoint's schedule, as ``dataclasses.asdict`` gives them.

    Returns:
        The schedule to follow and one line for each field that changes, old -> new. Under ``override`` the old value
        is the checkpoint's; under ``checkpoint`` it is the recipe's, which is given up.

    Raises:
        ValueError: under ``error``, when any field differs.
    """
    previous = LRSchedule(**{**stored, "on_conflict": current.on_conflict})
    changes = previous.differences(current)
    if current.on_conflict == "checkpoint":
        return previous, [f"schedule.{name}: {new} -> {old}" for name, old, new in changes]
    if changes and current.on_conflict == "error":
        listed = ", ".join(
            f"schedule.{name} {old} in the checkpoint but {new} in the recipe" for name, old, new in changes
        )
        raise ValueError(
            f"The checkpoint was trained with another schedule ({listed}): add `--model.schedule.on_conflict override` "
            "to follow the recipe or `--model.schedule.on_conflict checkpoint` to follow the checkpoint."
        )
    return current, [f"schedule.{name}: {old} -> {new}" for name, old, new in changes]


def _canonical(name: str, value: Any) -> Any:
    """The value of a field in the one form in which two schedules compare: a length as int, a fraction as float."""
    if value is None or name not in _LENGTHS:
        return value
    if name == "cooldown" and _FRACTION.fullmatch(str(value)):
        return float(value)
    return parse_count(value)


def _value_problems(schedule: LRSchedule) -> list[str]:
    """What is wrong with the rates, and with fields that the shape needs or has no use for."""
    s = schedule
    problems = []
    if not (math.isfinite(s.peak) and s.peak > 0):
        problems.append(f"schedule.peak={s.peak}: must be a finite number > 0.")
    elif not 0 <= s.floor <= s.peak:
        problems.append(f"schedule.floor={s.floor}: must lie between 0 and schedule.peak={s.peak}.")
    if s.shape in ("cosine", "linear", "wsd") and s.horizon is None:
        problems.append(f"schedule.horizon=null: shape {s.shape} needs the end of its decay in {s.unit}, as in 20k.")
    if s.shape == "constant" and s.horizon is not None:
        problems.append(f"schedule.horizon={s.horizon}: shape constant never decays; set it to null.")
    if s.shape == "constant" and s.floor != 0:
        problems.append(f"schedule.floor={s.floor}: shape constant never decays; set it to 0.")
    if s.shape == "wsd" and s.cooldown is None:
        problems.append("schedule.cooldown=null: shape wsd needs the length of its final decay, as in 2k or 0.2.")
    if s.shape != "wsd" and s.cooldown is not None:
        problems.append(f"schedule.cooldown={s.cooldown}: shape {s.shape} has none; set it to null.")
    return problems


def _unreadable_lengths(schedule: LRSchedule) -> list[str]:
    """One line for each length that is not a number of units."""
    problems = []
    for name in _LENGTHS:
        try:
            _canonical(name, getattr(schedule, name))
        except ValueError as error:
            problems.append(f"schedule.{name}: {error}")
    return problems


def _length_problems(schedule: LRSchedule) -> list[str]:
    """What is wrong between lengths."""
    s = schedule
    problems = []
    if s.shape == "inverse_sqrt" and s.mixes_units:
        problems.append(
            f"schedule.warmup_unit={s.warmup_unit}: shape inverse_sqrt scales with the warm-up; set it to null or"
            f" {s.unit}."
        )
    elif s.shape == "inverse_sqrt" and s.warmup_end == 0:
        problems.append("schedule.warmup=0: shape inverse_sqrt scales with the warm-up; set it to 1 or more.")
    if s.decay_end is None:
        return problems
    if s.warmup_end >= s.decay_end and not s.mixes_units:
        problems.append(f"schedule.warmup={s.warmup}: must be below schedule.horizon={s.horizon}, which includes it.")
    elif (
        s.shape == "wsd"
        and s.cooldown is not None
        and not ((first := 0 if s.mixes_units else s.warmup_end) <= s.decay_start < s.decay_end)
    ):
        longest = s.decay_end - first
        problems.append(
            f"schedule.cooldown={s.cooldown}: must be above 0 and fit between warm-up and horizon, at most {longest}."
        )
    return problems
