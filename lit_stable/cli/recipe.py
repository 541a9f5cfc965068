"""Recipes: found by path or by name, read with their line numbers, put in order of inheritance.

A recipe may name others under ``base:``, which are applied before it. jsonargparse merges several ``--config`` by key,
so inheritance is a matter of rewriting the command line: each recipe becomes the chain of its layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import get_loader

from lit_stable.cli.directives import Composition, Directives, take_directives
from lit_stable.cli.shipped_recipes import shipped_recipes

_CONFIG_OPTIONS = ("--config", "-c")
_MOST = 100_000  # values of a recipe, what aliases repeat included, which may be without end
_load_yaml = get_loader("yaml")  # jsonargparse's own reading of scalars: 1e-4 is a float, 2024-01-31 is text
# A default may be a member of an enumeration where the option is text, as in Lightning's Timer; YAML knows its value.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


class RecipeError(ValueError):
    """A recipe that cannot be found or read; the message names every problem, one a line.

    Attributes:
        rest: What could be read, of which there may be more to say; None: nothing.
        is_whole: Whether that is all recipes, so that what they lack is lacking.
    """

    def __init__(self, message: str, rest: Expanded | None = None, is_whole: bool = False) -> None:
        super().__init__(message)
        self.rest, self.is_whole = rest, is_whole


@dataclass
class _Problems:
    """What is wrong with recipes as texts."""

    lines: list[str] = field(default_factory=list)
    is_whole: bool = True
    """Whether all of them could be found and read nevertheless."""

    def unread(self, line: str) -> None:
        """Take note of a file that is lacking now."""
        self.lines.append(line)
        self.is_whole = False

    def text(self) -> str:
        """One line each, once: a base that two share is read, and complained about, twice."""
        return "\n".join(dict.fromkeys(self.lines))


@dataclass(frozen=True)
class Layer:
    """One recipe file, without what it inherits."""

    path: Path
    data: dict[str, Any]
    """What the file sets, ``base`` and directives taken out."""

    text: str
    lines: dict[tuple[str, ...], int]
    """Line, counted from 1, of every key path that the text spells out."""
    directives: Directives = field(default_factory=Directives)
    """What it asks to be made of the layers; taken out of the data too."""

    def line(self, path: Sequence[str]) -> int:
        """Line of a key path; that of the closest key above where an alias or a merge key brings it in."""
        for length in range(len(path), 0, -1):
            if tuple(path[:length]) in self.lines:
                return self.lines[tuple(path[:length])]
        return 1


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
    problems = _Problems()
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
    problems = _Problems()
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


def _visit(path: Path, chain: tuple[Path, ...], seen: set[Path], problems: _Problems) -> list[Layer]:
    """Layers of one file, depth first; ``chain`` holds the files that lead here, ``seen`` those already applied."""
    try:
        layer, bases = _read(path, problems)
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


def _read(path: Path, problems: _Problems) -> tuple[Layer, list[str]]:
    """Read one file: the layer, and the names under its ``base:``."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = _lines(path, node, problems)  # first: to load what has no end takes for ever
        data = {} if node is None else _load_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"{path}:{line}: is not YAML: {error.problem}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: is not YAML: {error}.") from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise RecipeError(f"{path}: is nested without end; take out what is within itself.") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}:1: must hold keys with values, as in `trainer: {{max_steps: 100}}`.")
    if "config" in data:
        # jsonargparse would read it and silently drop keys that stand beside it.
        del data["config"]
        problems.lines.append(
            f"{path}:{lines.get(('config',), 1)}: config: is for the command line; inherit with `base:`."
        )
    base = data.pop("base", [])
    bases = [base] if isinstance(base, str) else base
    if not (isinstance(bases, list) and all(isinstance(name, str) for name in bases)):
        problems.unread(
            f"{path}:{lines.get(('base',), 1)}: base: must be the name of a recipe or a list of names, not {base!r}."
        )
        bases = []
    directives, found = take_directives(data)
    problems.lines += [f"{path}:{lines.get(key, 1)}: {'.'.join(key)}: {what}" for key, what in found]
    return Layer(path, data, text, lines, directives), bases


def _lines(path: Path, node: yaml.Node | None, problems: _Problems) -> dict[tuple[str, ...], int]:
    """The line of every key path; those that stand twice are problems."""
    lines: dict[tuple[str, ...], int] = {}
    for key_path, line in _key_lines(node, path, (), (), count()):
        if key_path in lines:
            already = f"stands on line {lines[key_path]} already; keep one."
            problems.lines.append(f"{path}:{line}: {'.'.join(key_path)}: {already}")
        lines.setdefault(key_path, line)
    return lines


def _key_lines(
    node: yaml.Node | None, file: Path, path: tuple[str, ...], above: tuple[yaml.Node, ...], visits: Iterator[int]
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Every key path in the text with its line, repeated keys included; list items count as keys 0, 1, ..."""
    if any(node is one for one in above):
        raise RecipeError(f"{file}: {'.'.join(path)}: holds itself, by an alias; write out what it shall hold.")
    if next(visits) > _MOST:
        raise RecipeError(f"{file}: holds more than {_MOST:,} values; take out aliases of what holds aliases.")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            key_path = (*path, str(key.value))
            yield key_path, key.start_mark.line + 1
            yield from _key_lines(value, file, key_path, (*above, node), visits)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _key_lines(item, file, (*path, str(index)), (*above, node), visits)
