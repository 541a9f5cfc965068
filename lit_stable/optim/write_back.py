"""The recipe's hyper-parameters over those that a checkpoint restored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

_TOLD = ("betas", "eps", "momentum", "weight_decay", "lr_factor")  # the rate has its own policy


def recipe_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything but the parameters of each group, as the recipe made it: taken before any checkpoint is loaded."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def write_back(optimizer: Optimizer, recipe: Sequence[dict[str, Any]]) -> list[str]:
    """Give each group the recipe's values again; one line, old -> new, for each that the checkpoint had otherwise."""
    lines = []
    for group, values in zip(optimizer.param_groups, recipe, strict=True):
        for key, value in values.items():
            restored = group.get(key)
            if key in _TOLD and restored is not None and _plain(restored) != _plain(value):
                lines.append(f"optimizer group {values['name']}: {key} {restored} -> {value} (recipe)")
            group[key] = value
    return lines


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
