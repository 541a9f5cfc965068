"""Every problem of a recipe or a command line at once, each in one line with its place and the nearest legal key.

jsonargparse stops at the first problem. Here each leaf of a recipe is parsed alone by the real parser, so that one
wrong value hides no other. What a recipe lacks is not judged leaf by leaf: another layer or the command line may add
it.
"""

from __future__ import annotations

import copy
import difflib
import re
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_stable.cli.parser_message import class_options, is_incomplete, reason, rejected_option
from lit_stable.cli.recipe_file import Layer

Path = tuple[str, ...]
Finding = tuple[Layer, Path, str]  # recipe file, key path, what is wrong
_HELP = re.compile(r"-h|--([\w.]+\.)?help(=.*)?|--print_config(=.*)?")
_NO_KEYS = ("help", "config", "print_config", "print_shtab")  # options of a parser that no recipe may hold
_FEW = 12  # as many names as a reader takes in at a glance
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")


def recipe_problems(layers: Sequence[Layer], parser: ArgumentParser) -> list[str]:
    """Check recipe files against the parser of the subcommand that will read them.

    Args:
        layers: as ``recipe.expand`` or ``recipe.expand_arguments`` returns them.
        parser: parser of one subcommand; it is used, not changed.

    Returns:
        Lines ``file:line: key: what is wrong; nearest is X.``, empty where all is well.
    """
    found = recipe_findings(layers, parser)
    return [f"{layer.path}:{layer.line(path)}: {'.'.join(path)}: {what}" for layer, path, what in found]


def recipe_findings(layers: Sequence[Layer], parser: ArgumentParser) -> list[Finding]:
    """The same, not yet in words."""
    findings: list[Finding] = []
    classes: dict[Path, str] = {}  # class_path by key, of this and earlier layers: a later one may give init_args alone
    with raising(parser):
        for layer in layers:
            classes.update(_class_paths(layer.data))
            found = dict(_layer_problems(layer.data, parser, classes))
            findings += [(layer, path, what) for path, what in found.items()]
    return findings


def argument_problems(argv: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Check the arguments behind a subcommand, as ``recipe.expand_arguments`` returns them, recipes free of problems.

    Returns:
        Lines ``--option: what is wrong; nearest is --x.``, and last what the recipes and the good options together
        still lack. Empty where all is well, and where the arguments ask for help or for a print-out.
    """
    judged = judge_arguments(argv, parser)
    return judged.problems if judged.lacking is None else [*judged.problems, judged.lacking]


class Judged(NamedTuple):
    """What arguments come to."""

    problems: list[str]
    """A line for each wrong option."""
    good: list[str]
    """The arguments without them."""
    lacking: str | None = None
    """What these still lack."""
    parsed: Namespace | None = None
    """What the parser makes of the arguments where nothing is wrong; None where they ask for help or a print-out."""


def judge_arguments(argv: Sequence[str], parser: ArgumentParser) -> Judged:
    """The same in parts."""
    if any(_HELP.fullmatch(word) for word in argv):
        return Judged([], list(argv))
    with raising(parser):
        try:
            return Judged([], list(argv), parsed=parser.parse_args(list(argv)))
        except ArgumentError:  # and now one by one
            pass
        options = list(_options(argv))
        recipes = [word for option in options if option[0] == "--config" for word in option]
        problems: list[str] = []
        good: list[str] = []
        for option in options:
            # Together with the recipes, since an option may set one argument of a class that a recipe names.
            error = None if option[0] == "--config" else error_of(parser, [*recipes, *option])
            if error is None or is_incomplete(error):
                good += option
            else:
                problems += _argument_problems(option, error, parser)
        lacking = error_of(parser, good)
    return Judged(problems, good, None if lacking is None else f"{reason(lacking)}.")


def _argument_problems(option: Sequence[str], error: str, parser: ArgumentParser) -> list[str]:
    name, equals, value = option[0].partition("=")
    path = tuple(name.lstrip("-").split("."))
    known = _known(parser)
    if not name.startswith("--"):
        return [f"{name}: is no option; options start with --, as in --trainer.max_steps 100."]
    unknown = _unknown_part(path, known)
    if unknown is not None:
        return [f"{name}: is no option{_remedy(path[:unknown], known, '--')}."]
    given = value if equals else " ".join(option[1:]) or None
    inside = _read(given)
    if isinstance(inside, dict) or ".".join(path) in _groups(known):
        found = dict(_layer_problems(_nested(path, inside, {}), parser, {}))
        if found:
            return [f"--{'.'.join(place)}: {what}" for place, what in found.items()]
    return [f"{name}: {_describe(error, given, path)}"]


def _read(text: str | None) -> Any:
    """What stands on the command line, as the parser reads it."""
    try:
        return yaml.safe_load(text or "null")
    except yaml.YAMLError:
        return text


def _layer_problems(
    data: dict[str, Any], parser: ArgumentParser, classes: dict[Path, str]
) -> Iterator[tuple[Path, str]]:
    known = _known(parser)
    own_classes = dict(_class_paths(data))
    judged: list[Path] = []  # keys whose problem was named already, and under which everything would be wrong too
    for path, value in _leaves(data):
        if any(path[: len(prefix)] == prefix for prefix in judged):
            continue
        unknown = _unknown_part(path, known)
        if unknown is not None:
            judged.append(path[:unknown])
            yield path[:unknown], f"is no option{_remedy(path[:unknown], known)}."
        elif ".".join(path) in _groups(known):
            if value != {}:
                yield path, f"must hold options below it, not {value!r}; write some or remove the key."
        elif any(path[:n] in own_classes and path[n] not in _CLASS_KEYS for n in range(len(path))):
            yield path, "stands beside class_path; arguments of the class stand under init_args."
        else:
            error = error_of(parser, _nested(path, value, classes))
            if error is not None and not is_incomplete(error):
                if whole := _no_mapping(path, known, parser):
                    judged.append(whole)
                    given = reduce(getitem, whole, data)
                    yield whole, _describe(error_of(parser, _nested(whole, given, classes)) or error, given, whole)
                    continue
                if path[-1] == "class_path":
                    judged.append(path[:-1])
                option = rejected_option(error)
                if option in path[:-1]:  # a wrong key that holds others: all of them are wrong with it
                    path = path[: len(path) - path[::-1].index(option)]
                    judged.append(path)
                yield path, _describe(error, value, path)


def _no_mapping(path: Path, known: list[str], parser: ArgumentParser) -> Path | None:
    """The option above a leaf that takes no mapping at all, if that is what is wrong."""
    groups = _groups(known)
    above = (path[:n] for n in range(1, len(path)))
    option = next((part for part in above if ".".join(part) in known and ".".join(part) not in groups), None)
    error = None if option is None else error_of(parser, _nested(option, {}, {}))
    if error is None or is_incomplete(error) or "subclass" in error or "class_path" in error:
        return None
    return option


def _describe(error: str, value: Any, path: Path) -> str:
    """One sentence about one leaf."""
    option = rejected_option(error)
    if option is None:
        return f"{reason(error, value, path[-1])}."
    options = class_options(error)
    near = difflib.get_close_matches(option, options, n=1)
    # A list is checked as a whole: there the wrong word lies somewhere below the key.
    subject = "is no option" if option == path[-1] else f"{option} is no option here"
    remedy = f"nearest is {near[0]}" if near else f"there are {', '.join(options) or 'none'}"
    return f"{subject}; {remedy}."


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Smallest parts of a recipe: scalars, lists, empty mappings; a class_path before the arguments of its class."""
    if not (isinstance(value, dict) and value):
        yield path, value
        return
    for key in sorted(value, key=lambda key: key != "class_path"):
        yield from _leaves(value[key], (*path, str(key)))


def _class_paths(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield path, value["class_path"]
        for key, below in value.items():
            yield from _class_paths(below, (*path, str(key)))


def _nested(path: Path, value: Any, classes: dict[Path, str]) -> dict[str, Any]:
    """The recipe that sets this leaf only, and the classes on the way to it."""
    recipe: dict[str, Any] = {}
    below = recipe
    for depth, key in enumerate(path):
        if path[:depth] in classes and key in _CLASS_KEYS:
            below["class_path"] = classes[path[:depth]]
        elif path[:depth] in classes:  # the short form, arguments without init_args, for a class of an earlier layer
            below["class_path"] = classes[path[:depth]]
            below = below.setdefault("init_args", {})
        if depth == len(path) - 1:
            below[key] = copy.deepcopy(value)  # the parser writes into what it is given
        else:
            below = below.setdefault(key, {})
    return recipe


def _known(parser: ArgumentParser) -> list[str]:
    """Every key that a recipe may hold, groups included."""
    # argparse has no public list of its options. Options such as --trainer.logger.help are no keys.
    keys = [action.dest for action in parser._actions]
    return [key for key in keys if key.split(".")[-1] not in _NO_KEYS]


def _groups(known: list[str]) -> set[str]:
    """Keys that only hold other keys."""
    return {key.rsplit(".", depth)[0] for key in known for depth in range(1, key.count(".") + 1)}


def _unknown_part(path: Path, known: list[str]) -> int | None:
    """How many components of a key path are needed to see that it is no option; None where it is one.

    What lies below an option, as an argument of a class or a key of a dict, is for the parser to judge.
    """
    groups = _groups(known)
    for length in range(1, len(path) + 1):
        key = ".".join(path[:length]).removesuffix("+")  # jsonargparse appends to a list with `key+:`
        if key in groups:
            continue
        return None if key in known else length
    return None


def _remedy(path: Path, known: list[str], dashes: str = "") -> str:
    """What to write for a key whose last part is wrong: a sibling spelt alike, the same word elsewhere, any sibling."""
    group = "".join(f"{key}." for key in path[:-1])
    siblings = sorted({key.removeprefix(group).split(".")[0] for key in known if key.startswith(group)})
    if near := difflib.get_close_matches(path[-1], siblings, n=1):
        return f"; nearest is {dashes}{group}{near[0]}"
    if elsewhere := [key for key in known if key.split(".")[-1] == path[-1]]:
        return f"; nearest is {dashes}{elsewhere[0]}"
    return f"; there are {', '.join(siblings)}" if len(siblings) <= _FEW else ""


def _options(argv: Sequence[str]) -> Iterator[list[str]]:
    """Each option with the values behind it; a value without option stands alone."""
    current: list[str] = []
    for word in argv:
        if current and not word.startswith("--") and current[0].startswith("--") and "=" not in current[0]:
            current.append(word)
            continue
        if current:
            yield current
        current = [word]
    if current:
        yield current


def error_of(parser: ArgumentParser, given: dict[str, Any] | Sequence[str]) -> str | None:
    """What the parser says against a recipe or arguments; None where it accepts them."""
    try:
        if isinstance(given, dict):
            parser.parse_object(given, defaults=False)
        else:
            parser.parse_args(list(given))
    except ArgumentError as error:
        return str(error)
    return None


@contextmanager
def raising(parser: ArgumentParser) -> Iterator[None]:
    """Make the parser raise ArgumentError instead of printing its usage and exiting."""
    exits = parser.exit_on_error
    parser.exit_on_error = False
    try:
        yield
    finally:
        parser.exit_on_error = exits
