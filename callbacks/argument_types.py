"""Arguments judged by their annotations: YAML and the command line hold to them, and Python does not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import os
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Number
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

_Class = TypeVar("_Class")
_Part = tuple[str, Any, Any]  # where it stands, what it is, and its annotation

_LONGEST = 100  # characters of a value that a sentence repeats


def judges_arguments(
    error: type[Exception], section: str | None = None, asks_again: bool = True
) -> Callable[[type[_Class]], type[_Class]]:
    """Class decorator: an argument that is not what its annotation says is refused where it is given.

    What the class itself says comes first, of each argument, also where it stops at the first; then, one sentence a
    line, what it says nothing of, or would die of. Where the annotation names a dataclass, a mapping of some of its
    fields is made one. A bool is no number; numbers of numpy and torch are some; a path is good for text, and whatever
    has a length for a list. What an annotation says beyond numbers, text, words, lists, mappings and dataclasses is not
    judged.

    Args:
        error: What is raised, and what the class raises.
        section: Where a recipe has the options: a sentence then begins with ``mesh.replicate='2'``, and without one
            with the call, ``GradClip(max_norm='1')``.
        asks_again: Whether ``__init__`` may be called again, on the object that comes to nothing, to hear all that it
            says. Not so where it may do more than set attributes: it then raises as it does without this, and of an
            argument of the wrong kind nothing is called.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        init: Callable[..., None] = cls.__init__
        signature = inspect.signature(init)
        annotated = cls if dataclasses.is_dataclass(cls) else init  # an inherited field is read in its own module

        @functools.wraps(init)  # so that its signature stays in sight
        def judged(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = None
            with contextlib.suppress(TypeError):  # not its arguments, which Python itself refuses, in its own words
                bound = signature.bind(self, *args, **kwargs)
            if bound is None:
                return init(self, *args, **kwargs)
            given = bound.arguments
            hints = {name: hint for name, hint in _hints(annotated).items() if _is_one(signature, name, given)}
            wrong = {name: found for name, hint in hints.items() if (found := wrong_parts(name, given[name], hint))}
            if wrong:
                told = f"{section}.{{}}={{}}" if section else f"`{type(self).__name__}({{}}={{}})`"
                own_words = _own_words(init, bound, error, hints, wrong) if asks_again else []
                raise error("\n".join(_sentences(told, wrong, given, own_words)))
            given.update({name: built(given[name], hint) for name, hint in hints.items()})
            try:
                return init(*bound.args, **bound.kwargs)
            except error as own:
                lines = _own_words(init, bound, error, hints, ()) if asks_again else []
                if set(lines) <= set(str(own).splitlines()):
                    raise
                raise error("\n".join(lines)) from None

        cls.__init__ = judged  # type: ignore[method-assign]
        return cls

    return decorate


@functools.cache
def _hints(annotated: Any) -> dict[str, Any]:
    try:
        return get_type_hints(annotated)
    except (NameError, TypeError, AttributeError):  # a stranger's, which is there for a type checker only
        return {}


def _is_one(signature: inspect.Signature, name: str, given: Mapping[str, Any]) -> bool:
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return name in given and signature.parameters[name].kind not in many


def _own_words(
    init: Callable[..., None],
    bound: inspect.BoundArguments,
    error: type[Exception],
    hints: Mapping[str, Any],
    wrong: Collection[str],
) -> list[str]:
    """What a class itself says: of the arguments as they are, then again with defaults for what was named until then.

    So the first that it refuses hides no other. What it says of a default is dropped: nobody gave that.
    """
    lines = _raised(init, bound, error)
    parameters, left = bound.signature.parameters, dict(bound.arguments)
    gone: set[str] = set()
    while about := {name for name in left if name in wrong or any(_names(name, line) for line in lines)} - gone:
        gone |= about
        left = {
            name: parameters[name].default if name in gone else built(value, hints.get(name, Any))
            for name, value in left.items()
        }
        if any(parameters[name].default is inspect.Parameter.empty for name in about):
            break
        found = _raised(init, inspect.BoundArguments(bound.signature, OrderedDict(left)), error)
        lines += [line for line in found if line not in lines and not any(_names(name, line) for name in gone)]
    return lines


def _names(name: str, line: str) -> bool:
    return re.search(rf"\b{name}\b['\])]*[=\[]", line) is not None


def _raised(init: Callable[..., None], bound: inspect.BoundArguments, error: type[Exception]) -> list[str]:
    try:
        init(*bound.args, **bound.kwargs)
    except (error, ValueError) as own:
        # Sentences; a ValueError of Python, at a value of the wrong kind, is none.
        return [line for line in str(own).splitlines() if line.endswith(".")]
    except Exception:  # it took a value for what it is not
        return []
    return []


def _sentences(told: str, wrong: Mapping[str, list[_Part]], given: Mapping[str, Any], own: list[str]) -> list[str]:
    """The class's own lines, but for those about a part of a value that it took apart wrongly; then the others."""
    about = {name: [line for line in own if re.search(rf"\b{name}\b.*=", line.split(": must")[0])] for name in wrong}
    meant = {name: [given[name], *(value for _, value, _ in parts)] for name, parts in wrong.items()}
    apart = [line for name, lines in about.items() for line in lines if not _quotes(line, meant[name])]
    ours = [
        f"{told.format(place, _short(value))}: must be {rule(hint)}."
        for name, parts in wrong.items()
        if set(about[name]) <= set(apart)
        for place, value, hint in parts
    ]
    return [line for line in own if line not in apart] + ours


def _quotes(line: str, values: list[Any]) -> bool:
    return any(f"={text}" in line for value in values for text in (repr(value), str(value)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


# -- what an annotation allows ---------------------------------------------------------------------------------------


def wrong_parts(place: str, value: Any, hint: Any) -> list[_Part]:
    """What in a value is not as annotated; of a union, by the member with the fewest and then the innermost faults."""
    alike = [parts for member in _members(hint) if (parts := _parts(value, member)) is not None]
    if not alike:
        return [(place, value, hint)]
    found = [[wrong for at, part, own in parts for wrong in wrong_parts(place + at, part, own)] for parts in alike]
    return min(found, key=lambda wrong: (len(wrong), -max((len(at) for at, *_ in wrong), default=0)))


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _parts(value: Any, hint: Any) -> list[_Part] | None:
    """What a value is made of; ``None`` where it is not of the annotation's kind at all."""
    kind = get_origin(hint) or hint
    if kind is Literal:
        return [] if isinstance(value, (str, Number)) and value in get_args(hint) else None
    if is_typeddict(hint):
        return _at_keys(value, _hints(hint)) if isinstance(value, Mapping) else None
    if _is_dataclass(hint) and not isinstance(value, hint):
        return _at_keys(value, _hints(hint)) if _is_options(value, hint) else None
    if kind in (dict, Mapping):
        return _at_keys(value, dict.fromkeys(value, _each(hint))) if isinstance(value, Mapping) else None
    if kind in (list, tuple, Sequence):
        return [(f"[{i}]", v, _each(hint, i)) for i, v in enumerate(value)] if _is_list(value) else None
    return [] if kind not in _PLAIN or _PLAIN[kind][0](value) else None


def _at_keys(value: Mapping[Any, Any], hints: Mapping[Any, Any]) -> list[_Part]:
    return [(f"[{key!r}]", part, hints[key]) for key, part in value.items() if key in hints]


def _each(hint: Any, index: int = 0) -> Any:
    """The annotation of an element of a list, or of a value of a mapping; ``Any`` where there is none."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is tuple and ... not in inner:
        return inner[index] if index < len(inner) else Any  # how many there must be, the class says
    return inner[kind in (dict, Mapping)] if inner else Any


def built(value: Any, hint: Any) -> Any:
    """A value that is as annotated, with each mapping that stands for a dataclass made one."""
    for member in _members(hint):
        if _is_dataclass(member) and _is_options(value, member):
            return member(**value)
        if get_origin(member) in (dict, Mapping) and isinstance(value, Mapping) and _is_dataclass(_each(member)):
            return {key: built(one, _each(member)) for key, one in value.items()}
    return value


def _is_dataclass(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_options(value: Any, cls: Any) -> bool:
    """Whether a value is a mapping from which a dataclass can be made."""
    if not isinstance(value, Mapping):
        return False
    parameters = inspect.signature(cls).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    return needed <= set(value) <= set(parameters)


def _is_list(value: Any) -> bool:
    is_scalar = getattr(value, "ndim", 1) == 0  # of numpy and torch
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping)) and not is_scalar


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (_is_single(value) and "bool" in str(getattr(value, "dtype", "")))


def _is_single(value: Any) -> bool:
    return bool(getattr(value, "ndim", 0) == 0)


def _is_number(value: Any) -> bool:
    return hasattr(type(value), "__float__") and _is_single(value) and not _is_flag(value)


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:  # 3.0 is none
        return False
    return _is_number(value)


# -- how a sentence calls it -----------------------------------------------------------------------------------------

#: Of each plain annotation: whether a value is one, and what one and many of them are called.
_PLAIN: dict[Any, tuple[Callable[[Any], bool], str, str]] = {
    int: (_is_whole, "a whole number", "whole numbers"),
    float: (_is_number, "a number", "numbers"),
    bool: (_is_flag, "True or False", "True or False"),
    str: (lambda value: isinstance(value, (str, os.PathLike)), "a string", "strings"),
    types.NoneType: (lambda value: value is None, "None", "None"),
}


def rule(hint: Any) -> str:
    """What an annotation allows, as it stands behind "must be"."""
    return ", or ".join(_called(member, many=False) for member in _members(hint))


def _called(hint: Any, many: bool) -> str:
    kind = get_origin(hint) or hint
    if kind in _PLAIN:
        _, one, several = _PLAIN[kind]
        return several if many else one
    if kind is Literal:
        return f"{'' if many else 'one of '}{', '.join(map(str, get_args(hint)))}"
    if _is_dataclass(hint):
        return (
            f"`{hint.__name__}({', '.join(inspect.signature(hint).parameters)})`, or a mapping with some of these keys"
        )
    if kind in (dict, Mapping) or is_typeddict(hint):
        return ("mappings" if many else "a mapping") + (f" of {', '.join(_hints(hint))}" if is_typeddict(hint) else "")
    if kind in (list, tuple, Sequence):
        each = " or ".join(_called(member, many=True) for member in _members(_each(hint)))
        return f"{'lists' if many else 'a list'} of {each}"
    return f"`{getattr(hint, '__name__', hint)}`"
