"""All runs below a folder, as the tree of who grew out of whom."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lit_stable.run.branch import Parent, read_parent
from lit_stable.run.folder import checkpoint_step, checkpoints


@dataclass
class Run:
    """One run folder."""

    folder: Path
    parent: Parent | None
    children: list[Run] = field(default_factory=list)
    """What grew out of it, by the step at which it did."""
    problem: str | None = None
    """Why it is not known what it grew out of."""

    @property
    def origin(self) -> Path | None:
        """Where its parent lies."""
        return None if self.parent is None else (self.folder / self.parent.run).resolve()


def find_runs(root: Path) -> list[Run]:
    """The runs below ``root`` that grew out of none of them, by folder; the others hang below these."""
    folders = sorted({path.parent for path in root.rglob("recipe-[0-9]*.yaml")})
    runs = {folder.resolve(): _run(folder) for folder in folders}
    begun: list[Run] = []
    for run in runs.values():
        parent = None if run.origin is None else runs.get(run.origin)
        (begun if parent is None else parent.children).append(run)
    for run in runs.values():
        run.children.sort(key=lambda child: (child.parent.step if child.parent else 0, child.folder))
    return begun


def _run(folder: Path) -> Run:
    try:
        return Run(folder, read_parent(folder))
    except ValueError as error:
        return Run(folder, None, problem=str(error))


def draw(root: Path) -> str:
    """The tree as text: a line for each run with its last logged step and checkpoints, below it what it changed."""
    runs = find_runs(root)
    if not runs:
        return f"{root}: no runs."
    return "\n".join(line for run in runs for line in _lines(run, root, "", ""))


def _lines(run: Run, root: Path, first: str, rest: str) -> Iterator[str]:
    came = []
    if run.parent is not None:
        # A parent outside the tree is named; one within it is the line above.
        elsewhere = "" if first else f" of {run.parent.run}"
        came = [f"from step {run.parent.step}{elsewhere}"]
    yield f"{first}{run.folder.relative_to(root)}  {', '.join([*came, *_standing(run.folder)])}"
    below = rest + ("│   " if run.children else "    ")
    if run.parent is not None:
        for difference in run.parent.differences:
            yield f"{below}{difference}"
    if run.problem is not None:
        yield f"{below}{run.problem}"
    for child in run.children:
        last = child is run.children[-1]
        yield from _lines(child, root, rest + ("└── " if last else "├── "), rest + ("    " if last else "│   "))


def _standing(folder: Path) -> list[str]:
    """How far a run has come, and where one could go on from."""
    row, unread = _last_row(folder)
    logged = f"step {row[0]}, loss {row[1]:.4f}" if row else "no step logged"
    logged += "".join(f" ({path.relative_to(folder)} cannot be read)" for path in unread)
    steps = [checkpoint_step(path) for path in checkpoints(folder)]
    return [logged, f"checkpoints {', '.join(map(str, steps))}" if steps else "no checkpoint"]


def _last_row(folder: Path) -> tuple[tuple[int, float] | None, list[Path]]:
    """Step and training loss that were logged last; and the newer files that cannot be read."""
    unread: list[Path] = []
    for path in sorted(folder.glob("csv-*/metrics.csv"), reverse=True):
        try:
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if row.get("train/loss") and row.get("step")]
            if rows:
                return (int(float(rows[-1]["step"])), float(rows[-1]["train/loss"])), unread
        except (OSError, ValueError, OverflowError, csv.Error):
            unread.append(path)
    return None, unread
