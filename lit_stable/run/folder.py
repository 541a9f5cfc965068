"""Numbered run folders: ``ROOT/NAME/0001``, never written over, and how to find the run to go on with."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from lit_stable.callbacks.branch_end import pending_target
from lit_stable.callbacks.checkpoint_files import recover

CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d+)\.ckpt$")
_AT_STEP = re.compile(r"(?P<run>.+)@(?P<step>\d[\d_]*)")


def new_folder(root: Path, name: str) -> Path:
    """Create and return the next free numbered folder. Two processes that ask at once get two folders."""
    parent = root / name
    parent.mkdir(parents=True, exist_ok=True)
    number = max((int(p.name) for p in run_folders(root, name)), default=0)
    while True:
        number += 1
        folder = parent / f"{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def run_folders(root: Path, name: str) -> list[Path]:
    """The run folders of a name, oldest first."""
    parent = root / name
    folders = [p for p in parent.iterdir() if p.name.isdigit()] if parent.is_dir() else []
    return sorted(folders, key=lambda p: int(p.name))


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / CHECKPOINTS / f"step-{step:08d}.ckpt"


def checkpoint_step(path: Path) -> int | None:
    """The step in a checkpoint's name; ``None`` for other names, half-written ones among them."""
    match = _STEP.match(path.name)
    return int(match.group(1)) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """A run's finished checkpoints, by step."""
    home = folder / CHECKPOINTS
    if not home.is_dir():
        return []
    for replaced in home.glob("*.replaced"):  # a kill between two renames
        recover(replaced.with_suffix(""))
    return sorted((p for p in home.iterdir() if checkpoint_step(p) is not None), key=lambda p: checkpoint_step(p) or 0)


def where_to_go_on(folder: Path, has_ladder: bool) -> Path | None:
    """The checkpoint from which a run goes on; ``None`` if it has none.

    Args:
        folder: Run folder.
        has_ladder: Whether a rewind that has not begun is gone on with.
    """
    pending = pending_target(folder) if has_ladder else None
    return pending or next(reversed(checkpoints(folder)), None)


def newest_run_with_checkpoint(root: Path, name: str) -> Path | None:
    """The newest run of a name that has something to go on from."""
    return next((folder for folder in reversed(run_folders(root, name)) if checkpoints(folder)), None)


def find_checkpoint(ckpt_path: str, root: Path, name: str) -> Path:
    """The checkpoint that ``--ckpt_path`` means.

    Args:
        ckpt_path: ``last``; a path; a run folder, also one below ``root`` as ``NAME/0002`` (its last one); or
            ``RUN@STEP``, where RUN is such a folder or a name (the newest of its runs that has that step).
        root: Folder of all runs.
        name: Name of the run for which it is asked.

    Raises:
        ValueError: when there is none; the message says what does exist.
    """
    if ckpt_path == "last":
        folder = newest_run_with_checkpoint(root, name)
        if folder is None:
            raise ValueError(
                f"ckpt_path=last: no run of {name!r} under {root} has a checkpoint; name one, or use `--resume auto`,"
                " which starts a new run when there is none."
            )
        return checkpoints(folder)[-1]
    if not ckpt_path.strip():
        raise ValueError(f"ckpt_path={ckpt_path!r}: names no checkpoint; give a file, a run folder or RUN@STEP.")
    path = Path(ckpt_path).expanduser()  # a shell leaves `--ckpt_path=~/a.ckpt` as it is
    if not path.exists() and (match := _AT_STEP.fullmatch(str(path))):
        return _checkpoint_at(match["run"], int(match["step"].replace("_", "")), root)
    if not path.exists() and (root / path / CHECKPOINTS).is_dir():
        path = root / path
    if (path / CHECKPOINTS).is_dir():
        found = checkpoints(path)
        if not found:
            raise ValueError(f"ckpt_path={path}: this run folder has no checkpoint yet; name another.")
        return found[-1]
    if not path.exists():
        beside = [p.name for p in sorted(path.parent.glob("*.ckpt"))] if path.parent.is_dir() else []
        remedy = f"{path.parent} has {', '.join(beside)}" if beside else f"{path.parent} has no checkpoint"
        raise ValueError(f"ckpt_path={path}: does not exist; {remedy}.")
    return path if path.name else path.resolve()  # of "." the name is empty, and others are made of it


def _checkpoint_at(run: str, step: int, root: Path) -> Path:
    folders = [path for path in (Path(run), root / run) if (path / CHECKPOINTS).is_dir()][:1] or run_folders(root, run)
    for folder in reversed(folders):
        if (path := checkpoint_path(folder, step)) in checkpoints(folder):
            return path
    if not folders:
        names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        near = difflib.get_close_matches(run, names, n=1) or names
        raise ValueError(
            f"ckpt_path={run}@{step}: {run} is neither a run folder nor the name of a run; under {root} there is"
            f" {', '.join(near) or 'none'}."
        )
    steps = [f"{folder} has {_steps(folder)}" for folder in folders]
    raise ValueError(f"ckpt_path={run}@{step}: no checkpoint of that step; {'; '.join(steps)}.")


def _steps(folder: Path) -> str:
    return ", ".join(str(checkpoint_step(path)) for path in checkpoints(folder)) or "none"
