"""The parts of a recipe of images and captions, each built by itself, for what it says against its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jsonargparse import Namespace

from lit_stable.model.config import GPTConfig
from lit_stable.vlm.datamodule import PairDataModule
from lit_stable.vlm.options import GatedOptions, VisionOptions


def parts(config: Namespace) -> Iterator[Callable[[], Any]]:
    """One function for each part of a parsed recipe, that raises ValueError."""
    model, data = config["model"], config["data"].as_dict()
    yield lambda: GatedOptions(**model["gated"].as_dict())
    yield lambda: VisionOptions(**model["vision"].as_dict())
    yield lambda: _refuse_idle_blocks(model)
    yield lambda: PairDataModule(**data)
    yield lambda: _refuse_tensor_parallel(config["mesh"]["tensor_parallel"])


def _refuse_idle_blocks(model: Namespace) -> None:
    try:
        gpt, gated = GPTConfig(**model["gpt"].as_dict()), GatedOptions(**model["gated"].as_dict())
    except ValueError:  # each is judged by itself
        return
    gated.places(gpt)


def _refuse_tensor_parallel(size: int) -> None:
    if size > 1:
        raise ValueError(f"mesh.tensor_parallel={size}: new blocks and vision backbone cannot be split; set it to 1.")
