"""Runs that grew out of others: when a resume is another run, and what its folder says of where it came from."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_stable.callbacks.whole_file import write_whole
from lit_stable.run.folder import CHECKPOINTS

FILE = "parent.yaml"

SCHEDULE = "model.schedule."  # has a policy of its own for a resume, which speaks for itself
#: What may differ between a run and its resume without being worth a line.
_UNREMARKABLE = (
    "run.",
    "checkpoints.",
    "control.",
    "graceful_stop.",
    "trainer.logger",
    "trainer.default_root_dir",
    "resume",
    "ckpt_path",
    "ckpt_part",
    "config",
)
#: What may change while the run stays the same one: how far it goes, what is written of it, on how much it runs.
_THE_SAME_RUN = (
    *_UNREMARKABLE,
    *("validate_every", "trainer.max_steps", "trainer.max_time", "trainer.log_every_n_steps", "trainer.enable_"),
    *("trainer.devices", "trainer.num_nodes", "data.num_workers", "data.validation"),
    *("model.schedule.on_conflict", "surgery."),  # which does nothing unless the model changes
    "model.vision.hf",  # a folder may move; another model in it is refused
)


@dataclass(frozen=True)
class Parent:
    """Where a branch left another run."""

    run: str
    """The run folder it left, relative to its own; or the checkpoint, where that lies in no run folder."""
    step: int
    """Optimizer steps that were committed when it left."""
    differences: list[str]
    """What it does otherwise, ``key: old -> new``."""


def write_parent(folder: Path, checkpoint: Path, step: int, differences: list[str]) -> None:
    """Write down in a run's folder what it grew out of."""
    origin = run_folder_of(checkpoint) or checkpoint
    parent = Parent(os.path.relpath(origin.resolve(), folder.resolve()), step, differences)
    write_whole(folder / FILE, yaml.safe_dump(asdict(parent), sort_keys=False, width=1000))


def read_parent(folder: Path) -> Parent | None:
    """What a run grew out of; None: it began at step 0.

    Raises:
        ValueError: when the file that says so cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    found = read_mapping(path)
    try:
        parent = Parent(**found)
        ok = isinstance(parent.run, str) and isinstance(parent.step, int) and isinstance(parent.differences, list)
    except TypeError:
        ok = False
    if not ok:
        raise ValueError(f"{path}: cannot be read (it needs run, step and differences); put it back as it was.")
    return parent


def read_mapping(path: Path) -> dict[str, Any]:
    """What a YAML file of a run folder holds.

    Raises:
        ValueError: when it cannot be read, or holds no mapping; the text names it and says why.
    """
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or getattr(error, "problem", None) or " ".join(str(error).split())
    else:
        if isinstance(found, dict):
            return found
        why = "it is empty" if found is None else f"it holds a {type(found).__name__} where a mapping belongs"
    raise ValueError(f"{path}: cannot be read ({why}); put it back as it was.")


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, if it lies in one."""
    folder = checkpoint.parent.parent
    return folder if checkpoint.parent.name == CHECKPOINTS and stored_recipes(folder) else None


def stored_recipes(folder: Path) -> list[Path]:
    """The recipes that a run folder was trained with, oldest first."""
    return sorted((p for p in folder.glob("recipe-[0-9]*.yaml") if session_number(p)), key=session_number)


def session_number(path: Path) -> int:
    """Which session's a file of a run folder is, ``recipe-02.yaml`` as 2; 0: that of none."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def is_another_run(folder: Path, recipe: dict[str, Any], data: dict[str, str]) -> bool:
    """Whether a recipe, or what its data hold, changes what the run in ``folder`` computes: to go on is a branch.

    All recipes of one folder compute the same, so one that cannot be read is passed over, and said.

    Raises:
        ValueError: when none of its recipes can be read.
    """
    recipes = stored_recipes(folder)
    stored = _newest_readable(recipes)
    if recipes and stored is None:
        raise ValueError(
            f"{recipes[-1]}: cannot be read, nor any other recipe of the run, so nobody can tell whether this is it;"
            " put it back, or begin a branch with --ckpt_path."
        )
    if stored is not None and changes(stored, recipe, _THE_SAME_RUN):
        return True
    environment = _newest_readable(sorted(folder.glob("environment-[0-9]*.yaml"), key=session_number))
    held = (environment or {}).get("data")
    return bool(changes(held if isinstance(held, dict) else data, data, _THE_SAME_RUN))


def _newest_readable(paths: list[Path]) -> dict[str, Any] | None:
    from lit_stable.run.console import say  # late: it takes Lightning, and `ctl` and `runs` do not wait for that

    for path in reversed(paths):
        try:
            return read_mapping(path)
        except ValueError as error:
            say(f"passed over: {str(error).partition(';')[0]}")
    return None


def remarkable_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The changes that are worth a line of a branch's record."""
    return changes(old, new, _UNREMARKABLE)


def changes(old: dict[str, Any], new: dict[str, Any], but: tuple[str, ...] = ()) -> list[str]:
    """Lines ``key: old -> new`` for every leaf in which two resolved recipes differ.

    Left out are keys that begin with one of ``but``, and the schedule unless the new recipe overrides it: otherwise the
    checkpoint's is followed, or the resume is refused. A feature that only one of them has is one line.
    """
    if _on_conflict(new) != "override":
        but = (*but, SCHEDULE)
    before, after = leaves(_folded(old, new)), leaves(_folded(new, old))
    keys = [*after, *(k for k in before if k not in after)]
    return [
        f"{key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}"
        for key in keys
        if before.get(key) != after.get(key) and not key.startswith(but)
    ]


def _on_conflict(recipe: dict[str, Any]) -> Any:
    return recipe.get("model", {}).get("schedule", {}).get("on_conflict")


def _folded(node: Any, other: Any) -> Any:
    """A recipe in which each class that ``other`` has no mapping for is one text."""
    if not isinstance(node, dict):
        return node
    if "class_path" in node and not isinstance(other, dict):
        given = [f"{name}={value!r}" for name, value in node.get("init_args", {}).items() if value is not None]
        return f"{node['class_path'].rsplit('.', 1)[-1]}({', '.join(given)})"
    return {key: _folded(value, other.get(key) if isinstance(other, dict) else None) for key, value in node.items()}


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """A resolved recipe as one mapping, its keys joined by dots."""
    if not isinstance(node, dict) or not node:
        return {prefix.removesuffix("."): node}
    return {key: value for k, v in node.items() for key, value in leaves(v, f"{prefix}{k}.").items()}
