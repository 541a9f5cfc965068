"""What is frozen when: rules as a recipe writes them, and as a pure function of progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from .base import MisconfigurationException
from .module_patterns import Norms


class FreezeRule(TypedDict, total=False):
    """One rule as a plain mapping; every key may be left out."""

    modules: list[str]
    """Shell patterns for module names, counted from the LightningModule; default ``["*"]``, all."""
    norms: Literal["only", "except", "with"]
    """``only`` norm layers in those modules (the default), all ``except`` norms, or everything ``with`` them."""
    start: int
    """First progress at which they are frozen; default 0."""
    stop: int | None
    """First progress at which they are free again; default none: never."""


class Rule(NamedTuple):
    """A checked rule: these modules are frozen while ``start <= progress < stop``."""

    modules: tuple[str, ...]
    norms: Norms
    start: int
    stop: int | None

    @property
    def for_good(self) -> bool:
        """Frozen from the start and never freed."""
        return self.start == 0 and self.stop is None

    def holds(self, progress: int) -> bool:
        """Whether the rule freezes the step that begins at this progress."""
        return progress >= self.start and (self.stop is None or progress < self.stop)


def check_rules(rules: Sequence[Mapping[str, Any]]) -> list[Rule]:
    """Fill in what rules leave out.

    Raises:
        MisconfigurationException: with everything that is wrong in any rule.
    """
    problems = [] if rules else ["`LayerNormFreeze(rules=[])`: freezes nothing; give at least one rule."]
    for index, rule in enumerate(rules):
        problems += [f"`LayerNormFreeze(rules[{index}])`: {problem}" for problem in _problems(rule)]
    if problems:
        raise MisconfigurationException("\n".join(problems))
    return [
        Rule(tuple(r.get("modules", ["*"])), r.get("norms", "only"), r.get("start", 0), r.get("stop")) for r in rules
    ]


def _problems(rule: Mapping[str, Any]) -> list[str]:
    problems = []
    known = list(FreezeRule.__annotations__)
    if unknown := [key for key in rule if key not in known]:
        problems.append(f"unknown key {unknown[0]!r}; the keys are {', '.join(known)}.")
    modules, norms = rule.get("modules", ["*"]), rule.get("norms", "only")
    start, stop = rule.get("start", 0), rule.get("stop")
    if isinstance(modules, str) or not modules:
        problems.append(f"modules={modules!r}: must be a list of at least one pattern.")
    if norms not in ("only", "except", "with"):
        problems.append(f"norms={norms!r}: must be only, except or with.")
    if start < 0:
        problems.append(f"start={start}: must be 0 or more.")
    if stop is not None and stop <= start:
        problems.append(f"stop={stop}: must be greater than start={start}; leave it out to freeze for good.")
    return problems
