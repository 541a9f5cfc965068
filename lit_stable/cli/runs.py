"""`lit-stable runs DIR`: the tree of runs below a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_stable.run.tree import draw


def run_runs(argv: Sequence[str]) -> None:
    """Parse the arguments of ``runs`` and print the tree."""
    parser = ArgumentParser(
        prog="lit-stable runs",
        description="Draw the tree of runs: where each left its parent, and what it does otherwise.",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="Folder of all runs.")
    folder = parser.parse_args(list(argv)).folder
    if not folder.is_dir():
        raise ValueError(f"{folder}: is no folder; give the one that holds the runs (run.root, by default runs).")
    print(draw(folder))
