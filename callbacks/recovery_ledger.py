"""What was done to recover a run, in a file of lines that are written before anything is done, and never again.

A line is one :class:`Entry`. The file is the authority: budgets, branches, dropped data and a rewind under way follow
from its lines and from nothing else, so that a process killed at any moment goes on where it was. Lines are ordered by
their number; the time of day stands in them for people alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .line_file import append_lines
from .plain_values import plain

FILE = "recovery.jsonl"


@dataclass(frozen=True)
class Entry:
    """One line."""

    number: int
    """Its place in the run's history, from 1."""
    run: str
    """Whose history it belongs to; checkpoints carry the same word."""
    branch: int
    """How many rewinds came before it that were made."""
    step: int
    """Optimizer step after which it was written, counted from 1."""
    action: str
    """``start``, ``checkpoint``, ``wait``, ``skip``, ``lr``, ``rewind``, ``begun`` (a branch), ``stop``, ``result``,
    ``go_on``."""
    why: str = ""
    """Kind of the event that it answers."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The numbers behind it."""
    done: dict[str, Any] = field(default_factory=dict)
    """What was done, in numbers."""
    time: str = ""
    """When, by the clock on the wall, in UTC."""

    def __post_init__(self) -> None:
        if not self.time:
            object.__setattr__(self, "time", datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @property
    def key(self) -> tuple[Any, ...]:
        """What a run that repeats its steps after a kill would write once more."""
        told = tuple(self.done.get(name) for name in ("rung", "path", "of"))
        return self.branch, self.step, self.action, *told, self.is_done

    @property
    def is_done(self) -> bool:
        """False: a run under ``action: log`` has told it, and nothing was done."""
        return self.done.get("acted") is not False


def read_ledger(path: Path) -> list[Entry]:
    """The lines of a file, in order; none if there is no file. A line that a kill cut short is left out."""
    found: list[Entry] = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            found.append(Entry(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return found


def append(path: Path, entries: Iterable[Entry]) -> None:
    """Add lines, all of them or none, and wait until they are on disk.

    Raises:
        OSError: when they cannot be written; the file is then as it was.
    """
    append_lines(path, [json.dumps(plain(asdict(entry)), allow_nan=False) for entry in entries])


def of_run(entries: Iterable[Entry], run: str) -> list[Entry]:
    """The lines of one run."""
    return [entry for entry in entries if entry.run == run]


def last_run(entries: Sequence[Entry]) -> list[Entry]:
    """The lines of the run that was written of last."""
    return of_run(entries, entries[-1].run) if entries else []
