"""Where in the recipes a problem comes from that showed only when the parts were built."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lit_stable.cli.features import FEATURES, nested_options
from lit_stable.cli.recipe_file import Layer

_KEY = re.compile(r"(?P<key>[a-z_]\w*(?:\.\w+)+|[a-z_]+)[=:]")
_CLASS = re.compile(r"`(?P<name>\w+)(?:\((?:(?P<argument>\w+)=)?|`)")
_OF_CLASS = {
    **{feature.__name__: f"stability.{name}" for name, feature in FEATURES.items()},
    **{
        nested.__name__: f"stability.{name}.{option}"
        for name, feature in FEATURES.items()
        for option, nested in nested_options(feature).items()
    },
    "RunControl": "control",
    "GracefulStop": "graceful_stop",
}


def located(problems: Sequence[str], layers: Sequence[Layer], argv: Sequence[str]) -> list[str]:
    """The problems, each with file and line in front where a recipe set the value that it is about.

    Args:
        problems: Sentences that begin with ``key=value`` or with the class of a feature, as ``GradClip(max_norm=0)``
            in backticks.
        layers: The recipe files, in the order in which they apply.
        argv: The options that came after them; what is set there has no line.
    """
    typed = [word.lstrip("-").partition("=")[0] for word in argv if word.startswith("--")]
    return [place + problem for problem in problems for place in [_place(_keys(problem), layers, typed)]]


def _keys(problem: str) -> list[str]:
    """Keys that the problem may be about, the most exact first."""
    if match := _CLASS.match(problem):
        feature = _OF_CLASS.get(match["name"])
        exact = f"{feature}.{match['argument']}"
        return [] if feature is None else [exact, f"{feature}.init_args.{match['argument']}", feature]
    match = _KEY.match(problem)
    return [match["key"]] if match else []


def _place(keys: Sequence[str], layers: Sequence[Layer], typed: Sequence[str]) -> str:
    for key in keys:
        if any(option == key or option.startswith(f"{key}.") for option in typed):
            return ""
        for layer in reversed(layers):
            if tuple(key.split(".")) in layer.lines:
                return f"{layer.path}:{layer.lines[tuple(key.split('.'))]}: "
    return ""
