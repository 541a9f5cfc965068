"""`lit-stable recipes [NAME]`: the shipped recipes, and what each begins to say of itself."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_stable.cli.shipped_recipes import shipped_recipes


def run_recipes(argv: Sequence[str]) -> None:
    """Parse the arguments of ``recipes`` and print a line for each."""
    parser = ArgumentParser(
        prog="lit-stable recipes", description="List the recipes that --config takes by name, with what each is."
    )
    parser.add_argument("part", nargs="?", default="", help="Only those whose name holds this, as a folder's.")
    part = parser.parse_args(list(argv)).part
    found = {name: path for name, path in shipped_recipes().items() if part in name}
    if not found:
        raise ValueError(f"{part}: is part of no recipe's name; `lit-stable recipes` lists all.")
    width = max(map(len, found))
    room = max(20, shutil.get_terminal_size((120, 20)).columns - width - 2)
    print("\n".join(f"{name:<{width}}  {_shortened(first_sentence(path), room)}" for name, path in found.items()))


def first_sentence(path: Path) -> str:
    """Of the comment that a recipe begins with; empty where it has none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = " ".join(line.removeprefix("#").strip() for line in lines[:end])
    return re.split(r"(?<=[a-z)])[.:] (?=\S)", text, maxsplit=1)[0].rstrip(".:")


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 4].rstrip()} ..."
