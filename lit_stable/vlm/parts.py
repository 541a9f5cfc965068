"""The parts of a recipe of images and captions, each built by itself, for what it says against its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jsonargparse import Namespace

from lit_stable.model.config import GPTConfig
from lit_stable.vlm.datamodule import PairDataModule
from lit_stable.vlm.options import GatedOptions, VisionOptions, tensor_parallel_problem


def parts(config: Namespace) -> Iterator[Callable[[], Any]]:
    """One function for each part of a parsed recipe, that raises ValueError."""
    model, data = config["model"], config["data"].as_dict()
    yield lambda: GatedOptions(**model["gated"].as_dict())
    yield lambda: VisionOptions(**model["vision"].as_dict())
    yield lambda: _refuse_idle_blocks(model)
    yield lambda: PairDataModule(**data)
    yield lambda: _refuse(tensor_parallel_problem(config["mesh"]["tensor_parallel"]))


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ValueError(problem)


def _refuse_idle_blocks(model: Namespace) -> None:
    try:
        gpt, gated = GPTConfig(**model["gpt"].as_dict()), GatedOptions(**model["gated"].as_dict())
    except ValueError:  # each is judged by itself
        return
    gated.places(gpt)
