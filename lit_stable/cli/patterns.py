"""Patterns of a recipe that speak of parameters, tried on the model's own before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.laws import idle_overrides
from lit_stable.optim.build import optimizer_groups
from lit_stable.optim.options import OptimizerOptions, PatternOptions


def optimizer_options(values: Mapping[str, Any]) -> OptimizerOptions:
    """The options of a parsed recipe, whose patterns are plain mappings still."""
    patterns = {pattern: PatternOptions(**options) for pattern, options in values["patterns"].items()}
    return OptimizerOptions(**{**values, "patterns": patterns})


def refuse_idle_patterns(gpt: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    """Raise ValueError when a pattern of ``init_overrides`` or ``optimizer.patterns`` matches nothing.

    Without patterns nothing is built. What is wrong with the options themselves is for others to say.
    """
    if not (gpt["init_overrides"] or optimizer["patterns"]):
        return
    try:
        config, options = GPTConfig(**gpt), optimizer_options(optimizer)
    except ValueError:
        return
    with torch.device("meta"):
        model = GPT(dataclasses.replace(config, init_overrides={}))
    problems = idle_overrides(model, config)
    try:
        optimizer_groups(model, options)
    except ValueError as error:
        problems += [f"model.{line}" for line in str(error).splitlines()]
    if problems:
        raise ValueError("\n".join(problems))
