"""Which system a command line asks for, and the parts of its recipe that others do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from jsonargparse import Namespace

from lit_stable.cli.patterns import refuse_idle_patterns
from lit_stable.cli.recipe_file import Layer
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.epochs import SampleOrder
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.sources import Source
from lit_stable.data.weights import WeightSchedule
from lit_stable.systems import DEFAULT

_DATA_PARTS = {"order": SampleOrder, "weight_schedule": WeightSchedule, "mask_repeats": MaskRepeats}


def system_asked_for(layers: Sequence[Layer], typed: Sequence[str]) -> str:
    """The name in recipes and options, before they are parsed: the last one counts."""
    names: list[str] = [layer.data["system"] for layer in layers if isinstance(layer.data.get("system"), str)]
    for word, following in zip_longest(typed, typed[1:], fillvalue=""):
        if word == "--system" or word.startswith("--system="):
            names.append(word.partition("=")[2] or following)
    return names[-1] if names else DEFAULT


def system_parts(config: Namespace) -> Iterator[Callable[[], Any]]:
    """Of a parsed recipe, a function for each part of module and data that raises ValueError about its values."""
    if config["system"] == "vlm":
        from lit_stable.vlm.parts import parts

        yield from parts(config)
    else:
        yield from _text_parts(config)


def _text_parts(config: Namespace) -> Iterator[Callable[[], Any]]:
    model, data = config["model"], config["data"].as_dict()
    yield lambda: refuse_idle_patterns(model["gpt"].as_dict(), model["optimizer"].as_dict())
    sources = {name: Source(**source) for name, source in data["sources"].items()}
    parts = {key: None if data[key] is None else part(**data[key]) for key, part in _DATA_PARTS.items()}
    yield lambda: TokenDataModule(**{**data, **parts, "sources": sources})
