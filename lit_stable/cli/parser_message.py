"""Reads the messages of jsonargparse: what it refused, and why, without the listing of every type it tried."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser

_REQUIRED = "the following arguments are required: "
_REJECTED = re.compile(r"(?:[Oo]ption '|unrecognized arguments: --)(?P<option>[^'=\s]+)")
_KEYS = re.compile(r"(?P<what>Missing required|Unexpected) keys: \{(?P<keys>.*?)\}\. Got value: (?P<value>.*)")
_EXPECTED = re.compile(
    r"Expected an? (?P<type>.+?)(?:\. Got value: (?P<value>.*))?$|Not a valid subclass of (?P<class>\w+)"
)
_KEY = re.compile(r'Parser key "([^"]+)"')
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_NO_REASON = re.compile(r"Parser key|Does not validate|Subtypes:|Errors:|Given value|Problem with given class_path")
_TYPE_NAMES = {"int": "an int", "float": "a float", "str": "text", "bool": "true or false", "NoneType": "null"}
_TYPE_NAMES |= {"list": "a list", "dict": "a mapping", "tuple": "a list"}


def is_incomplete(message: str) -> bool:
    """Whether the parser misses something: it says so only after it has accepted what is there."""
    return _REQUIRED in message


def missing(message: str) -> list[str]:
    """The keys that an incomplete recipe lacks; of those inside a class the parser names one class at a time."""
    names = message.split(_REQUIRED)[-1].splitlines()[0].split(", ")
    return [".".join([*_KEY.findall(message), name]) for name in names]


def rejected_option(message: str) -> str | None:
    """The key that no group or class accepts, if that is the problem; of one inside it the key itself."""
    match = _REJECTED.search(message)
    return match["option"].split(".")[0] if match else None


def class_options(message: str) -> list[str]:
    """Arguments of the innermost class that the message is about; empty if it is about none."""
    found = _CLASS.findall(message)
    if not found:
        return []
    module, _, name = found[-1].rpartition(".")
    # A parser of its own, because it follows **kwargs to the classes that take them.
    return list(ArgumentParser().add_class_arguments(getattr(import_module(module), name)))


def reason(message: str, value: Any = None, key: str = "") -> str:
    """The message as one clause.

    Args:
        message: Text of the parser's ArgumentError.
        value: What stands in the recipe or on the command line.
        key: Last part of the key whose value this is.
    """
    keys = _KEY.findall(message)
    if is_incomplete(message):
        return f"{', '.join(missing(message))}: missing; set in a recipe or on the command line"
    lines = _innermost(message.splitlines())
    said = [line.strip(" -") for line in lines if not _NO_REASON.match(line.strip(" -"))]
    for entry in filter(None, map(_KEYS.match, said)):  # of a mapping with given keys, inside a list
        verb = "lacks the key" if entry["what"].startswith("Missing") else "has an unknown key"
        return f"the entry {entry['value']} {verb} {entry['keys']}"
    expected = [match for line in said if (match := _EXPECTED.match(line))]
    if not expected or said[0].startswith("Import path"):
        return re.sub(r"^argument \S+: ", "", said[0] if said else message.splitlines()[0]).rstrip(".")
    # Below a list or a mapping that was checked as a whole, the parser names the part that is wrong.
    part = next((match["value"] for match in expected if match["value"]), None)
    given = repr(value) if part is None or part == str(value) else part
    owner = f"{keys[-1]} " if len(keys) > 1 and keys[-1] != key else ""
    return f"{owner}must be {_types([match['type'] or match['class'] for match in expected])}, not {given}"


def _innermost(lines: list[str]) -> list[str]:
    """The lines about the deepest key or class: those indented below the last line that names one."""
    starts = [
        i for i, line in enumerate(lines) if re.match(r"Parser key|Problem with given class_path", line.strip(" -"))
    ]
    if not starts:
        return lines
    depth = _indent(lines[starts[-1]])
    inner = []
    for line in lines[starts[-1] + 1 :]:
        if _indent(line) <= depth:
            break
        inner.append(line)
    return inner


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" -"))


def _types(written: list[str]) -> str:
    """``<class 'int'>`` as "an int", all Literals as one choice of values, the rest as jsonargparse writes it."""
    names, values = [], []
    for name in written:
        if name.startswith("typing.Literal["):
            values += re.sub(r"typing\.Literal\[|\]|'", "", name).split(", ")
        elif match := re.fullmatch(r"<class '(?:.*\.)?(\w+)'>", name):
            names.append(_TYPE_NAMES.get(match[1], f"a {match[1]}"))
        elif name.startswith("instantiatable class"):  # an abstract class as the type: one of its kind must be named
            names.append("a mapping with class_path")
        elif name.startswith("dot import path"):  # how it reads a word where a class of ours is due
            names.append("a mapping of its options")
        else:  # also the name of a class, of which a mapping gives the arguments
            article = "an" if name[0] in "AEIOU" else "a"
            names.append(f"{article} {name}")
    choice = [f"one of {', '.join(values)}"] if values else []
    return " or ".join(dict.fromkeys([*choice, *names]))
