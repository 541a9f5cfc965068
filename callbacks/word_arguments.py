"""Arguments that take one of a few words, by their annotation ``Literal[...]``: what a type checker would refuse."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def word_problems(init: Callable[..., None], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """One sentence for each argument of a class's ``__init__`` that is none of the words its annotation lists.

    YAML and the command line are judged by the same annotations; in Python nothing is, and whoever compares an argument
    with one of two words takes a third for the other.
    """
    try:
        given = inspect.signature(init).bind_partial(None, *args, **kwargs).arguments
        hints = {argument: hint for argument, hint in get_type_hints(init).items() if argument in given}
    except (TypeError, NameError):  # not its arguments, which Python itself refuses; a stranger's annotation
        return []
    return [
        f"`{name}({argument}={given[argument]!r})`: must be one of {', '.join(map(str, legal))}{_or_else(hint)}."
        for argument, hint in hints.items()
        if (legal := _words(hint)) and given[argument] not in legal and not isinstance(given[argument], _others(hint))
    ]


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(hint: Any) -> list[Any]:
    return [word for member in _members(hint) if get_origin(member) is Literal for word in get_args(member)]


def _or_else(hint: Any) -> str:
    return "".join(", or None" if kind is type(None) else f", or a {kind.__name__}" for kind in _others(hint))


def _others(hint: Any) -> tuple[type, ...]:
    """What may stand in place of a word, as the list in ``Literal["a"] | list[str]``."""
    found = [get_origin(member) or member for member in _members(hint) if get_origin(member) is not Literal]
    return tuple(kind for kind in found if isinstance(kind, type))
