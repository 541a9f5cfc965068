"""A full-size experiment as a toy of itself: everything that counts is divided by one rule.

A size fragment says how large the toy is:

    scale: {max_steps: 120, global_batch: 8, sequence_length: 64}

Each of the three, against what the recipes before the fragment say, gives a divisor: S of steps, B of batches, L of
lengths; 1 where the fragment names none or the experiment is not larger. Samples are divided by S x B and tokens by S x
B x L, so that ramps, warm-up, horizon, stages, overrides and steps to skip stand where they stood in the run. Rounded
to whole numbers, halves up; what was above 0 stays at least 1; validations stay ten steps apart, unless they stood
closer; a batch stays a multiple of ``data.micro_batch``; marks that rose keep rising.

Not scaled: learning rates and norms; windows and warm-ups of statistics; how often a monitor looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lit_stable.callbacks.stages import parse_count
from lit_stable.cli.scaled_forms import (
    scale_cadence,
    scale_fraction,
    scale_keys,
    scale_marks,
    scale_named_marks,
    scale_points,
    scale_ramp,
    scale_ranges,
    scale_stages,
    scale_validation,
)

#: What a fragment may name, and where an experiment says it.
TARGETS = {
    "max_steps": "trainer.max_steps",
    "global_batch": "data.global_batch",
    "sequence_length": "data.sequence_length",
}


@dataclass(frozen=True)
class Factors:
    """What each unit is divided by; what batches are multiples of, the scaled full one, and the scaled full length."""

    steps: Fraction = Fraction(1)
    batch: Fraction = Fraction(1)
    length: Fraction = Fraction(1)
    micro_batch: int = 1
    full_batch: int = 1
    full_length: int = 1

    def of(self, unit: str) -> Fraction:
        """The divisor of ``steps``, ``samples``, ``tokens``, ``batch`` or ``length``."""
        samples = self.steps * self.batch
        products = {"steps": self.steps, "samples": samples, "tokens": samples * self.length}
        return {**products, "batch": self.batch, "length": self.length}[unit]

    def scale(self, value: int | str, unit: str) -> int:
        """One quantity, divided and rounded.

        Raises:
            ValueError: when the value is no count.
        """
        count, least = parse_count(value), self.micro_batch if unit == "batch" else 1
        if self.of(unit) == 1:
            return count
        multiples = math.floor(count / (self.of(unit) * least) + Fraction(1, 2))
        return max(1, multiples) * least if count else 0

    def __str__(self) -> str:
        units = ("steps", "batch", "length", "samples", "tokens")
        return ", ".join(f"{unit} / {float(self.of(unit)):,.6g}" for unit in units if self.of(unit) != 1)


Form = Callable[[Any, Factors, str], Any]


def _count(value: Any, factors: Factors, unit: str) -> int:
    return factors.scale(value, unit)


#: key -> (how it is written, its unit); "unit" stands for what the key ``unit`` beside it says, by default the word
#: behind the colon, else steps; "warmup_unit" for what that key says, by default as "unit".
QUANTITIES: dict[str, tuple[Form, str]] = {
    "trainer.max_steps": (_count, "steps"),
    "validate_every": (scale_validation, "steps"),
    "checkpoints.every_steps": (scale_cadence, "steps"),
    "checkpoints.first_step": (_count, "steps"),
    "data.global_batch": (_count, "batch"),
    "data.sequence_length": (_count, "length"),
    "data.skip_steps": (scale_ranges, "steps"),
    "data.order.reshuffle": (scale_named_marks, "steps"),
    "data.weight_schedule.marks": (scale_keys, "unit:samples"),
    "model.gpt.max_length": (_count, "length"),
    "model.gpt.embed_grad_shrink": (scale_points, "steps"),
    "model.schedule.warmup": (_count, "warmup_unit"),
    "model.schedule.horizon": (_count, "unit"),
    "model.schedule.cooldown": (scale_fraction, "unit"),
    "stability.batch_size_warmup.ramp": (scale_ramp, "batch"),
    "stability.grad_clip.schedule": (scale_marks, "unit"),
    "stability.layer_norm_freeze.rules": (scale_marks, "unit"),
    "stability.lr_override.start": (_count, "unit"),
    "stability.lr_override.horizon": (_count, "unit"),
    "stability.lr_override.warmup": (_count, "unit"),
    "stability.lr_override.schedule": (scale_points, "unit"),
    "stability.optimizer_reset.start": (_count, "unit"),
    "stability.optimizer_reset.hold_steps": (_count, "steps"),
    "stability.scripted_skip.steps": (scale_ranges, "steps"),
    "stability.sequence_length_warmup.shape": (scale_stages, "length"),
    "stability.sequence_length_warmup.multiple_of": (_count, "length"),
    "stability.sequence_length_warmup.min_length": (_count, "length"),
    "stability.sequence_length_warmup.total_steps": (_count, "steps"),
}


def factors(recipe: Mapping[str, Any], targets: Mapping[str, int], micro_batch: int | None = None) -> Factors:
    """The divisors that bring a recipe down to ``targets``.

    Args:
        recipe: What the layers before the fragment say together.
        targets: Some of ``TARGETS``, at least one.
        micro_batch: The fragment's own ``data.micro_batch``, if it has one.

    Raises:
        ValueError: with each problem on a line, behind the target it is about.
    """
    problems, found = [], {}
    micro = next((n for n in (micro_batch, _get(recipe, "data.micro_batch")) if isinstance(n, int) and n > 0), 1)
    for name, target in targets.items():
        full = _get(recipe, TARGETS[name])
        if not isinstance(full, int) or full < 1:
            problems.append(
                f"scale.{name}: the recipes before this one set no {TARGETS[name]} to scale down from; name this one"
                " behind the experiment."
            )
        elif name == "global_batch" and target % micro:
            problems.append(f"scale.global_batch: {target} must be a multiple of data.micro_batch={micro}.")
        else:
            found[name] = max(Fraction(1), Fraction(full, target))
    if problems:
        raise ValueError("\n".join(problems))
    one = Fraction(1)
    steps, batch, length = (found.get(name, one) for name in TARGETS)
    sizes = (("data.global_batch", batch), ("data.sequence_length", length))
    full_batch, full_length = (
        math.ceil(full / divisor) if isinstance(full := _get(recipe, key), int) else 1 for key, divisor in sizes
    )
    return Factors(steps, batch, length, micro, full_batch, full_length)


def scaled(recipe: Mapping[str, Any], divisors: Factors) -> tuple[dict[str, Any], list[str]]:
    """The keys of a recipe that change, as a layer to lay over it, and a line ``key: from -> to`` for each.

    What cannot be read is left as it is: the parser names it.
    """
    layer: dict[str, Any] = {}
    lines = []
    for key, (form, unit) in QUANTITIES.items():
        group, name = key.rsplit(".", 1) if "." in key else ("", key)
        options = _get(recipe, group) if group else recipe
        path = group.split(".") if group else []
        if isinstance(options, dict) and "class_path" in options:
            options, path = options.get("init_args"), [*path, "init_args"]
        if not isinstance(options, dict) or options.get(name) is None:
            continue
        value = options[name]
        try:
            smaller = form(deepcopy(value), divisors, _counted(unit, options))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if smaller != value:
            _set(layer, [*path, name], smaller)
            lines.append(f"{key}: {value} -> {smaller}")
    return layer, lines


def _counted(unit: str, options: Mapping[str, Any]) -> str:
    """The unit of a quantity, by the options beside it where it says so."""
    if unit == "warmup_unit":
        unit = options.get("warmup_unit") or "unit"
    unit, _, default = unit.partition(":")
    return str(options.get("unit", default or "steps")) if unit == "unit" else unit


def _get(recipe: Mapping[str, Any], key: str) -> Any:
    node: Any = recipe
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _set(recipe: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        recipe = recipe.setdefault(part, {})
    recipe[path[-1]] = value
