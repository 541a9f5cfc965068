"""A recipe by its keys: as its layers have it, and as the command line resolves it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import yaml

from lit_stable.callbacks.stages import parse_count
from lit_stable.cli.command import Command
from lit_stable.cli.directives import merge
from lit_stable.cli.lightning_cli import LitStableCLI
from lit_stable.cli.recipe import Expanded, expand, expand_arguments, resolve_recipe
from lit_stable.cli.recipe_file import Layer
from lit_stable.cli.systems import system_asked_for
from lit_stable.systems import DEFAULT

#: In C where PyYAML has it: the same data in a tenth of the time.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: Dictionaries that are one value: their keys are the user's.
WHOLE = ("data.order.reshuffle", "model.gpt.init_overrides")
MISSING = "missing"
#: A recipe of each system that lacks nothing.
WHOLE_RECIPE = {"gpt": "quickstart", "vlm": "hf_vlm/captions"}


@functools.cache
def layers(name: str) -> tuple[Layer, ...]:
    """What its bases say, and last the file itself; read once, and nobody changes it."""
    return tuple(expand(resolve_recipe(name)))


def own_layer(name: str) -> Layer:
    """What the file itself says, without its bases."""
    return layers(name)[-1]


def written(name: str, instead: dict[str, Any] | None = None) -> dict[str, Any]:
    """All layers laid over each other, with what is asked of others (``scale``) beside; ``instead`` of the last one."""
    *bases, last = layers(name)
    merged: dict[str, Any] = {}
    for layer in bases:
        merged = merge(merged, layer.data)
    return merge(merged, as_written(last) if instead is None else instead)


def as_written(layer: Layer) -> dict[str, Any]:
    """A file's data, its ``scale`` included."""
    scale = {} if layer.directives.scale is None else {"scale": layer.directives.scale}
    return copy.deepcopy({**layer.data, **scale})


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Key path and value of each leaf."""
    if isinstance(node, dict) and ".".join(path) not in WHOLE:
        for key, value in node.items():
            yield from leaves(value, (*path, str(key)))
    else:
        yield path, node


def value(recipe: dict[str, Any], key: str) -> Any:
    """The value of a dotted key, ``init_args`` of features left out; MISSING where there is none."""
    node: Any = recipe
    for part in key.split("."):
        if isinstance(node, dict) and "class_path" in node:
            node = node.get("init_args", {})
        if not isinstance(node, dict) or part not in node:
            return MISSING
        node = node[part]
    return node


def same(here: Any, there: Any) -> bool:
    """Equal, whatever the spelling of a count."""
    if isinstance(here, str) != isinstance(there, str):
        try:
            return parse_count(here) == parse_count(there)
        except ValueError:
            return False
    return here == there and isinstance(here, bool) == isinstance(there, bool)


class Parsing(LitStableCLI):
    """A command line that is parsed and goes no further."""

    def __init__(self, *words: str) -> None:
        super().__init__(Command("check", list(words), *expand_arguments(words)))

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@functools.cache
def _parser(system: str = DEFAULT) -> Any:
    return Parsing("--config", WHOLE_RECIPE[system])._subcommand_parsers["fit"]


@functools.cache
def parsed(*names: str) -> Any:
    """The namespace of recipes laid over each other, each wrong key or value an error."""
    expanded = _expanded(names)
    return _parser_of(expanded).parse_args(expanded.argv)


def _expanded(names: tuple[str, ...]) -> Expanded:
    return expand_arguments([word for name in names for word in ("--config", name)])


def _parser_of(expanded: Expanded) -> Any:
    return _parser(system_asked_for(expanded.layers, []))


@functools.cache
def resolved(*names: str) -> dict[str, Any]:
    """The same as plain data, defaults included, with the sources that the recipe names, on disk or not."""
    with patch("lit_stable.cli.directives.stood_in", lambda *_: ({}, [])):
        expanded = _expanded(names)
    parser = _parser_of(expanded)
    text = parser.dump(parser.parse_args(expanded.argv), skip_unset=False, skip_validation=True)
    data: dict[str, Any] = yaml.load(text, Loader=_Loader)
    return data


@functools.cache
def built(*names: str) -> Any:
    """The same as objects: ``model``, ``data``, ``stability``."""
    return _parser_of(_expanded(names)).instantiate(parsed(*names))


def instantiated(*words: str) -> Any:
    """Objects of a command line with recipes and options."""
    return _parser().instantiate(_parser().parse_args(expand_arguments(words).argv))
