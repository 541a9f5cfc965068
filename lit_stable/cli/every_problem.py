"""All that is wrong with recipes and options, of every kind, in one message.

Wrong keys and values are found leaf by leaf, what shows only when parts are built is found when they are built. So that
the first kind does not hide the second, the parts are built from what is left without the wrong leaves, and with
something in the place of what is lacking.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lit_stable.cli.parser_message import is_incomplete, missing
from lit_stable.cli.places import located
from lit_stable.cli.problems import Finding, Path, error_of, judge_arguments, raising, recipe_findings
from lit_stable.cli.recipe import as_options
from lit_stable.cli.recipe_file import Layer

#: One of them is accepted wherever something is required.
_STAND_INS = ("1", "0.001", "{stand_in: {path: builtin:python-stdlib}}", "text", "[]", "{}")


def every_problem(
    argv: Sequence[str],
    layers: Sequence[Layer],
    parser: ArgumentParser,
    built: Callable[[Namespace], list[str]],
    is_whole: bool = True,
) -> tuple[list[str], Namespace | None]:
    """Lines about recipes, then about options, then about parts; and what the parser makes of them, if it accepts all.

    It makes nothing of arguments that ask for help or a print-out.

    Args:
        argv: Arguments behind the subcommand, recipes expanded.
        layers: The recipe files.
        parser: Parser of the subcommand; it is used, not changed.
        built: What is wrong with the parts of a parsed recipe; asked only where something else is wrong, since a recipe
            that parses is built anyway.
        is_whole: False: a recipe could not be read, so that nothing is known of what is lacking, or of whole parts.
    """
    findings = recipe_findings(layers, parser)
    problems = [f"{layer.path}:{layer.line(path)}: {'.'.join(path)}: {what}" for layer, path, what in findings]
    of_options, good, lacking, parsed = judge_arguments(_without(argv, findings), parser)
    problems += of_options
    if not is_whole:
        return problems, None
    wrong = {path for _, path, _ in findings}
    if lacking is not None and not any(".".join(path) in lacking for path in wrong):
        problems.append(lacking)
    if problems:
        with raising(parser):
            good, filled = _completed(good, parser)
            found = built(parser.parse_args(good)) if filled is not None else []
        # What stands in the place of a wrong value may fit nothing else: that is no fault of the recipe.
        made_up = {path[-1] for path in wrong} | {key.rpartition(".")[-1] for key in filled or ()}
        names = re.compile("|".join(rf"\b{re.escape(name)}=" for name in made_up) or "$^")
        problems += located([problem for problem in found if not names.search(problem)], layers, argv)
    return problems, None if problems else parsed


def _completed(good: list[str], parser: ArgumentParser) -> tuple[list[str], list[str] | None]:
    """Arguments with something in the place of all that is lacking, and its keys; None where nothing fits there."""
    filled: list[str] = []
    while (error := error_of(parser, good)) is not None:
        if not is_incomplete(error):
            return good, None
        for key in missing(error):
            fits = (v for v in _STAND_INS if key not in _still_missing(parser, [*good, f"--{key}", v], key))
            value = next(fits, None)
            if value is None:
                return good, None
            good = [*good, f"--{key}", value]
            filled.append(key)
    return good, filled


def _still_missing(parser: ArgumentParser, arguments: list[str], key: str) -> list[str]:
    """What is lacking of the arguments; the key too where its value is refused."""
    error = error_of(parser, arguments)
    if error is None:
        return []
    return missing(error) if is_incomplete(error) else [key]


def _without(argv: Sequence[str], findings: Sequence[Finding]) -> list[str]:
    """The arguments, each recipe without its wrong leaves."""
    mended: dict[str, str] = {}  # recipe as a word of the command line -> the same without them
    for layer in {id(layer): layer for layer, _, _ in findings}.values():
        recipe = copy.deepcopy(layer.data)
        for owner, path, _ in findings:
            if owner is layer:
                _remove(recipe, path)
        mended[as_options([layer.data])[1]] = as_options([recipe])[1]
    return [mended.get(word, word) for word in argv]


def _remove(recipe: dict[str, Any], path: Path) -> None:
    for part in path[:-1]:
        below = recipe.get(part)
        if not isinstance(below, dict):
            return
        recipe = below
    recipe.pop(path[-1], None)
