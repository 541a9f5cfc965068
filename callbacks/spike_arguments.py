"""From the arguments of GradSpikeSkip to the rules of its detector."""

from __future__ import annotations

from typing import Any

from .base import MisconfigurationException
from .spike_detector import SpikeRule

#: Least standard deviation, as a fraction of the window's median, for ``z_score``. Norms scatter more than losses do.
MIN_SPREAD = {"grad_norm": 0.5, "loss": 0.02}


def refuse_broken(arguments: dict[str, Any]) -> None:
    """Raise with one sentence for every argument that breaks its rule."""

    def above(least: float, name: str) -> bool:
        return arguments[name] is None or least < arguments[name] < float("inf")

    window = arguments["window"]
    rules = [
        ("threshold", above(0, "threshold"), "must be a finite number > 0, or None"),
        ("z_score", above(0, "z_score"), "must be a finite number > 0, or None"),
        ("ratio", above(1, "ratio"), "must be a finite number > 1, or None"),
        ("window", window >= 1, "must be at least 1"),
        ("warmup_steps", 1 <= arguments["warmup_steps"] <= max(window, 1), f"must lie between 1 and window={window}"),
        ("max_skips", arguments["max_skips"] >= 1, "must be at least 1"),
    ]
    problems = [f"`GradSpikeSkip({name}={arguments[name]!r})`: {rule}." for name, kept, rule in rules if not kept]
    if problems:
        raise MisconfigurationException("\n".join(problems))


def spike_rules(
    threshold: float | None, z_score: float | None, ratio: float | None, signal: str, warmup_steps: int
) -> dict[str, SpikeRule]:
    """The rule of every value that is judged, by name; a norm must be finite whatever else is judged."""

    def rule(name: str, limit: float | None) -> SpikeRule:
        return SpikeRule(limit, z_score, ratio, MIN_SPREAD[name], warmup_steps)

    if signal == "grad_norm":
        return {"grad_norm": rule("grad_norm", threshold)}
    if signal == "loss":
        return {"grad_norm": SpikeRule(), "loss": rule("loss", threshold)}
    # Of both only the norm has the absolute limit: one number cannot be right for two quantities.
    return {"grad_norm": rule("grad_norm", threshold), "loss": rule("loss", None)}
