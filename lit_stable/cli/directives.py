"""What a recipe says about other recipes instead of about the run: ``scale`` and ``stand_in``.

They are worked out while the layers are laid over each other, and never reach the parser: a stored recipe holds what
came of them. Options on the command line come after, as they are typed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_stable.cli.scale import TARGETS, factors, scaled
from lit_stable.cli.stand_in import stood_in

#: Dictionaries whose keys the user chooses: one value, replaced whole, as the parser does it.
_WHOLE = (
    *("data.sources", "data.validation", "data.order.reshuffle", "data.weight_schedule.marks"),
    "stability.extra",
)


@dataclass(frozen=True)
class Directives:
    """What one recipe file asks for."""

    scale: dict[str, int] | None = None
    """Largest size of the toy by name (see ``scale.TARGETS``): what the recipes before are scaled down to."""
    stand_in: str | None = None
    """What takes the place of sources that are not on disk; of several recipes the last one counts."""


def take_directives(data: dict[str, Any]) -> tuple[Directives, list[tuple[tuple[str, ...], str]]]:
    """Take the directives out of a recipe; with them the key and the sentence of each problem."""
    scale, stand_in = data.pop("scale", None), data.pop("stand_in", None)
    problems: list[tuple[tuple[str, ...], str]] = []
    if stand_in is not None and not isinstance(stand_in, str):
        problems.append((("stand_in",), f"must be a path or builtin:python-stdlib, not {stand_in!r}."))
    if scale is not None and not (isinstance(scale, dict) and scale):
        problems.append((("scale",), f"must hold at least one of {', '.join(TARGETS)}, not {scale!r}."))
    for name, target in scale.items() if isinstance(scale, dict) else ():
        if name not in TARGETS:
            near = difflib.get_close_matches(str(name), TARGETS, n=1)
            remedy = f"nearest is scale.{near[0]}" if near else f"there are {', '.join(TARGETS)}"
            problems.append((("scale", str(name)), f"is no option; {remedy}."))
        elif not isinstance(target, int) or isinstance(target, bool) or target < 1:
            problems.append((("scale", name), f"must be a whole number of at least 1, not {target!r}."))
    return (Directives() if problems else Directives(scale, stand_in)), problems


class Composition:
    """Layers laid over each other one by one, with what their directives make of them.

    Attributes:
        notes: Lines ``key: from -> to`` for all that was scaled or stood in for.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._merged: dict[str, Any] = {}
        self._stand_in: str | None = None

    def add(self, path: Path, data: dict[str, Any], directives: Directives) -> list[dict[str, Any]]:
        """Lay a recipe over those before; returns what to hand to the parser in its place, in order.

        Raises:
            ValueError: when there is nothing to scale, a line for each target.
        """
        layers = []
        if directives.scale is not None:
            own = data.get("data")
            micro_batch = own.get("micro_batch") if isinstance(own, dict) else None
            divisors = factors(self._merged, directives.scale, micro_batch)
            layer, lines = scaled(self._merged, divisors)
            self.notes += [f"scaled for {path.stem}: {divisors}" if lines else f"{path.stem}: nothing to scale"]
            self.notes += [f"  {line}" for line in lines]
            layers.append(layer)
        layers.append(data)
        for layer in layers:
            self._merged = merge(self._merged, layer)
        self._stand_in = directives.stand_in or self._stand_in
        return layers

    def finish(self) -> list[dict[str, Any]]:
        """What to hand to the parser behind the last recipe."""
        layer, lines = stood_in(self._merged, self._stand_in) if self._stand_in else ({}, [])
        self.notes += lines
        return [layer] if layer else []


def merge(below: Mapping[str, Any], over: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Two recipes as one, key by key; lists and dictionaries of the user's own keys are one value."""
    merged = dict(below)
    for key, value in over.items():
        old, name = merged.get(key), f"{prefix}{key}"
        if isinstance(old, dict) and isinstance(value, dict) and name not in _WHOLE:
            merged[key] = merge(old, value, f"{name}.")
        else:
            merged[key] = value
    return merged
