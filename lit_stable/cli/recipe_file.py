"""One recipe file: its values, the line of each key, and everything that is wrong with it as a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import get_loader

from lit_stable.cli.directives import Directives, take_directives

if TYPE_CHECKING:
    from lit_stable.cli.recipe import Expanded

_MOST = 100_000  # values of a recipe, what aliases repeat included, which may be without end
_load_yaml = get_loader("yaml")  # jsonargparse's own reading of scalars: 1e-4 is a float, 2024-01-31 is text


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
class Problems:
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


def read_recipe(path: Path, problems: Problems) -> tuple[Layer, list[str]]:
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


def _lines(path: Path, node: yaml.Node | None, problems: Problems) -> dict[tuple[str, ...], int]:
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
