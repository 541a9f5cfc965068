"""Where a run that the recovery ladder has turned round goes on, by the ladder's ledger alone."""

from __future__ import annotations

from pathlib import Path

from .recovery_ledger import FILE, last_run, read_ledger
from .recovery_standing import path_of, standing


def newest_of_branch(folder: Path) -> Path | None:
    """The checkpoint from which the run whose ledger lies in a folder goes on; ``None`` if there is none.

    A pure function of the file and of which checkpoints are there, so that all ranks may ask it.
    """
    if (target := pending_target(folder)) is not None:
        return target
    now = standing(last_run(read_ledger(folder / FILE)))
    there = [path for path in (path_of(folder, saved.path) for saved in now.saved) if path.exists()]
    return there[-1] if there else None


def pending_target(folder: Path) -> Path | None:
    """Where a rewind goes whose line stands in a folder's ledger and whose branch has not begun; ``None``: no such."""
    pending = standing(last_run(read_ledger(folder / FILE))).pending
    return None if pending is None else path_of(folder, pending.done["path"])
