"""Where a run stands by the lines of its recovery ledger: pure functions of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .positions import Range, merge_ranges
from .recovery_ledger import Entry


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the branch that a run is in, or of one that led to it."""

    step: int
    path: str
    """Relative to the ledger's folder where it lies below that."""
    healthy: bool
    number: int
    """Of its line."""


@dataclass
class Standing:
    """What follows from the lines."""

    branch: int = 0
    saved: list[Saved] = field(default_factory=list)
    """Checkpoints whose steps belong to the run as it is now, oldest first; each was about to be written."""
    abandoned: list[Saved] = field(default_factory=list)
    """Those that the last rewind left behind."""
    rewinds: list[Entry] = field(default_factory=list)
    pending: Entry | None = None
    """A rewind after which no training has begun yet."""
    to_pass: Entry | None = None
    """The last rewind, as long as no entry says that the run got past the window that it was for."""
    stopped: Entry | None = None
    """The end of the ladder, unless somebody decided to go on."""

    @property
    def dropped(self) -> list[Range]:
        """Ranges of the sample stream that are never read again, sorted and merged."""
        return merge_ranges(r for entry in self.rewinds for r in entry.done.get("dropped", []))

    @property
    def reshuffles(self) -> list[tuple[int, int]]:
        """(stream position, key) of each new order of what was still to be read, oldest first."""
        return [(int(p), int(k)) for entry in self.rewinds for p, k in entry.done.get("reshuffled", [])]

    @property
    def lr_factor(self) -> float:
        """What all rewinds together have made of the learning rate."""
        factor = 1.0
        for entry in self.rewinds:
            factor *= entry.done.get("factor") or 1.0
        return factor

    def override(self, name: str) -> Any:
        """``weight_decay``, ``dropout`` or ``clip`` as the last rewind that spoke of it has set it, else ``None``."""
        return next((e.done[name] for e in reversed(self.rewinds) if e.done.get(name) is not None), None)

    def latest(self) -> Saved | None:
        """The newest checkpoint to go on from: a rewind's target until its branch has begun."""
        if self.pending is not None:
            return next(s for s in self.saved if s.path == self.pending.done["path"])
        return self.saved[-1] if self.saved else None


def standing(entries: Iterable[Entry]) -> Standing:
    """Fold the lines of one run."""
    now = Standing()
    for entry in entries:
        _take(now, entry)
    return now


def _take(now: Standing, entry: Entry) -> None:
    if not entry.is_done:
        return
    if entry.action == "checkpoint":
        now.saved = [s for s in now.saved if s.path != entry.done["path"]]
        now.saved.append(Saved(entry.step, entry.done["path"], bool(entry.done["healthy"]), entry.number))
    elif entry.action == "stop":
        now.stopped = entry
    elif entry.action == "go_on":
        now.stopped = None
    elif entry.action == "begun":
        now.pending = None
    elif entry.action == "result" and now.to_pass is not None and entry.done.get("rewind") == now.to_pass.number:
        now.to_pass = None
    if entry.action == "rewind":
        target = entry.done["to"]
        now.abandoned = [s for s in now.saved if s.step > target]
        now.saved = [s for s in now.saved if s.step <= target]
        now.rewinds.append(entry)
        now.branch, now.pending, now.to_pass = now.branch + 1, entry, entry


def since_go_on(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The lines since somebody decided to go on after the end of the ladder: budgets begin anew there."""
    after = [index for index, entry in enumerate(entries, 1) if entry.action == "go_on"]
    return entries[after[-1] :] if after else entries


def times_taken(entries: Sequence[Entry], rung: int, branch: int, step: int, with_logged: bool = False) -> int:
    """How often a rung, counted from 1, was taken before ``step`` of ``branch``; ``with_logged``: or would have been.

    A run that repeats its steps after a kill comes by lines that it has written already: those of later steps of the
    branch it is in must not count against it.
    """
    before = _before(since_go_on(entries), branch, step)
    taken = [e for e in before if e.done.get("rung") == rung and e.action != "stop"]
    return sum(with_logged or e.is_done for e in taken)


def logged_factor(entries: Sequence[Entry], branch: int, step: int) -> float:
    """What a dry run would have made of the learning rate before ``step`` of ``branch``."""
    told = [e for e in _before(entries, branch, step) if not e.is_done]
    return math.prod(float(e.done.get("factor", 1.0)) for e in told)


def _before(entries: Iterable[Entry], branch: int, step: int) -> list[Entry]:
    return [e for e in entries if e.branch != branch or e.step < step]


def is_the_same_window(previous: Entry, first_bad: int) -> bool:
    """Whether a run has failed before it was well past the steps that the rewind before had left out."""
    return first_bad <= previous.step + int(previous.done.get("after", 0))


def targets(now: Standing, first_bad: int, before: int, named: int | None) -> list[Saved]:
    """Checkpoints that a rewind may go to, best first.

    Healthy ones alone, older than the first bad step; the newest that is older by more than ``before`` steps, then
    older ones, then those that are nearer. When the same window has failed before, older than the last rewind's target.
    A ``named`` step stands for itself, healthy or not.
    """
    if named is not None:
        return [s for s in reversed(now.saved) if s.step == named]
    newest = first_bad
    if now.rewinds and is_the_same_window(now.rewinds[-1], first_bad):
        newest = min(newest, now.rewinds[-1].done["to"])
    usable = sorted((s for s in now.saved if s.healthy and s.step < newest), key=lambda s: -s.step)
    early = [s for s in usable if s.step < first_bad - before]
    return early + list(reversed([s for s in usable if s not in early]))


def path_of(folder: Path, path: str) -> Path:
    """Where a checkpoint of the ledger lies."""
    return folder / path


def relative(folder: Path, path: Path) -> str:
    """A checkpoint's path as the ledger keeps it, so that a run's folder may be moved."""
    folder, path = folder.resolve(), path.resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
