"""Recipes: found by path or by name, and put in order of inheritance.

A recipe may name others under ``base:``, which are applied before it. jsonargparse merges several ``--config`` by key,
so inheritance is a matter of rewriting the command line: each recipe becomes the chain of its layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_stable.cli.directives import Composition
from lit_stable.cli.recipe_file import Layer, Problems, RecipeError, read_recipe
from lit_stable.cli.shipped_recipes import shipped_recipes

_CONFIG_OPTIONS = ("--config", "-c")
# A default may be a member of an enumeration where the option is text, as in Lightning's Timer; YAML knows its value.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def resolve_recipe(name_or_path: str | Path, folder: Path | None = None) -> Path:
    """Find a recipe: a file first, then a shipped name with or without ``.yaml``.

    Args:
        name_or_path: what stands behind ``--config`` or ``base:``.
        folder: where a relative path starts; the current folder if None.

    Raises:
        RecipeError: when there is neither, with the nearest names.
    """
    path = Path(name_or_path) if folder is None else folder / name_or_path
    if path.is_file():
        return path
    shipped = shipped_recipes()
    name = str(name_or_path).removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    beside = [str(other) for other in sorted(path.parent.glob("*.yaml"))]
    near = _nearest(str(name_or_path), [*shipped, *beside])
    folders = dict.fromkeys(f"{name.partition('/')[0]}/" if "/" in name else name for name in shipped)
    listed = f"there are {', '.join(folders)}; `lit-stable recipes` lists all"
    remedy = f"nearest: {', '.join(near)}" if near else listed
    raise RecipeError(f"recipe {str(name_or_path)!r}: is neither a file nor a shipped recipe; {remedy}.")


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """The three names that are most like one; without the folder, where it has none or no whole name is like it."""
    if near := difflib.get_close_matches(name, known, n=3):
        return near
    last = {one.rsplit("/", 1)[-1]: one for one in known}
    return [last[one] for one in difflib.get_close_matches(name.rsplit("/", 1)[-1], last, n=3)]


def expand(path: Path, applied: Sequence[Path] = ()) -> list[Layer]:
    """Read a recipe and all it inherits, in the order of application: each base before what names it.

    A base that two recipes share is applied once, at its first place, so that it does not undo what came between.

    Args:
        applied: Files that earlier recipes of the command line have brought in already.

    Raises:
        RecipeError: when a file cannot be read, holds a key twice or ``config:``, or inherits from itself.
    """
    problems = Problems()
    layers = _visit(path, (), {other.resolve() for other in applied}, problems)
    if problems.lines:
        raise RecipeError(problems.text())
    return layers


class Expanded(NamedTuple):
    """A command line without the names of recipes."""

    argv: list[str]
    """The arguments, each recipe in place of its name."""
    layers: list[Layer]
    """The recipe files in the order in which they apply."""
    notes: list[str]
    """What the recipes' directives made of them, ``key: from -> to``."""


def expand_arguments(argv: Sequence[str]) -> Expanded:
    """Replace every ``--config X`` by one ``--config`` for each layer of X, as YAML text.

    What directives make of the layers is a layer too: the scaled values stand before the fragment that scales, the
    stand-ins behind the last recipe.

    Raises:
        RecipeError: naming the problems of all recipes as texts, with what could be read.
    """
    rewritten: list[str] = []
    layers: list[Layer] = []
    problems = Problems()
    composition, end = Composition(), 0
    for option, value in _options(argv):
        if option not in _CONFIG_OPTIONS or value is None:
            rewritten += [option] if value is None else [option, value]
            continue
        try:
            path = resolve_recipe(value)
        except RecipeError as error:
            problems.unread(str(error))
            continue
        added = _visit(path, (), {layer.path.resolve() for layer in layers}, problems)
        layers += added
        for layer in added:
            try:
                rewritten += as_options(composition.add(layer.path, layer.data, layer.directives))
            except ValueError as error:
                lines = str(error).splitlines()
                problems.lines += [f"{layer.path}:{layer.line(['scale'])}: {line}" for line in lines]
        end = len(rewritten)
    if not problems.lines:
        rewritten[end:end] = as_options(composition.finish())
    expanded = Expanded(rewritten, layers, composition.notes)
    if problems.lines:
        raise RecipeError(problems.text(), expanded, problems.is_whole)
    return expanded


def as_options(recipes: Sequence[dict[str, Any]]) -> list[str]:
    """``--config TEXT`` for each recipe, as words of a command line."""
    texts = [yaml.dump(recipe, Dumper=_QuotingDumper, sort_keys=False) for recipe in recipes]
    return [word for text in texts for word in ("--config", text)]


def _visit(path: Path, chain: tuple[Path, ...], seen: set[Path], problems: Problems) -> list[Layer]:
    """Layers of one file, depth first; ``chain`` holds the files that lead here, ``seen`` those already applied."""
    try:
        layer, bases = read_recipe(path, problems)
    except RecipeError as error:
        problems.unread(str(error))
        return []
    chain = (*chain, path.resolve())
    layers: list[Layer] = []
    for base in bases:
        try:
            found = resolve_recipe(base, path.parent)
        except RecipeError as error:
            problems.unread(f"{path}:{layer.line(['base'])}: base: {error}")
            continue
        if found.resolve() in chain:
            problems.unread(
                f"{path}:{layer.line(['base'])}: base: {base} inherits from this file; remove one of the two."
            )
        elif found.resolve() not in seen:
            layers += _visit(found, chain, seen, problems)
    seen.add(path.resolve())
    return [*layers, layer]


class _QuotingDumper(yaml.SafeDumper):
    """Quotes all text: PyYAML writes the text '1e-4' bare, which jsonargparse would read back as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_QuotingDumper.add_representer(str, _quoted)


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The arguments one by one, except that a config option comes with its value."""
    arguments = iter(argv)
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option not in _CONFIG_OPTIONS:
            yield argument, None
        else:
            yield option, value if equals else next(arguments, None)
