"""The recovery ledger as a run keeps it: rank 0 reads and writes, all ranks know what stands in it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoint_files as files
from .base import rank_zero_info, rank_zero_warn
from .recovery_ledger import FILE, Entry, append, of_run, read_ledger
from .recovery_standing import Saved, Standing, logged_factor, path_of, relative, since_go_on, standing, times_taken
from .recovery_words import sentence
from .safe_checkpoints import SafeCheckpoints, wait_for_saves

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class RecoveryBook:
    """The lines of one run, and where they stand.

    Every method is called by all ranks with equal arguments. A line that cannot be written is kept and goes with the
    next one.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self.run = ""
        self.entries: list[Entry] = []
        self._source: Path | None = None  # folder whose lines were read
        self._unwritten: list[Entry] = []  # on rank 0
        self._warned = False

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / FILE

    @property
    def now(self) -> Standing:
        """What follows from the lines."""
        return standing(self.entries)

    def times_taken(self, rung: int, step: int, with_logged: bool) -> int:
        """How often a rung, counted from 1, was taken before a step of this branch; see :func:`times_taken`."""
        return times_taken(self.entries, rung, self.now.branch, step, with_logged)

    def logged_factor(self, step: int) -> float:
        """What a dry run would have made of the learning rate before a step of this branch."""
        return logged_factor(self.entries, self.now.branch, step)

    def begin(self, trainer: Trainer, folder: Path, step: int) -> None:
        """Start a run of no history, and keep its lines in a folder."""
        self.folder, self.entries, self._unwritten = folder, [], []
        self.run = trainer.strategy.broadcast(uuid.uuid4().hex[:12])
        self.add(trainer, step, "start")

    def find(self, trainer: Trainer, run: str, places: Sequence[Path]) -> None:
        """Read the run's lines from the first of some folders that has any."""
        found: tuple[Path | None, list[Entry]] = (None, [])
        if trainer.is_global_zero:
            for place in dict.fromkeys(places):
                if lines := of_run(read_ledger(place / FILE), run):
                    found = (place, lines)
                    break
        self._source, self.entries = trainer.strategy.broadcast(found)
        self.run, self._unwritten = run, []

    def go_on_in(self, folder: Path) -> None:
        """Keep the lines in a folder from here on; those that came from another one are copied with the next line."""
        source, self._source = self._source, None
        if source is not None and source.resolve() != folder.resolve():
            absolute = [_with_paths_from(source, folder, entry) for entry in self.entries]
            self.entries = absolute
            self._unwritten = list(absolute)
        self.folder = folder

    def add(self, trainer: Trainer, step: int, action: str, then: str = "", **fields: Any) -> bool:
        """Write a line, unless it stands there since the same steps were taken before a kill; whether it is on disk.

        ``then``: for people alone, what comes next.
        """
        now = self.now
        entry = Entry(len(self.entries) + 1, self.run, now.branch, step, action, **fields)
        if any(e.key == entry.key for e in since_go_on(self.entries)):
            return True
        self.entries.append(entry)
        if action not in ("checkpoint", "start", "begun"):
            rank_zero_warn(f"Recovery: {'; '.join([sentence(entry), *([then] if then else [])])}.")
        return bool(trainer.strategy.broadcast(self._write(entry) if trainer.is_global_zero else True))

    def forget_last(self) -> None:
        """Take back a line that could not be written."""
        self.entries.pop()
        self._unwritten = [e for e in self._unwritten if e.number <= len(self.entries)]

    def _write(self, entry: Entry) -> bool:
        self._unwritten.append(entry)
        try:
            append(self.path, self._unwritten)
        except OSError as error:
            if not self._warned:
                rank_zero_warn(
                    f"Recovery: {self.path} cannot be written: {error}; its lines are kept for the next try."
                )
            self._warned = True
            return False
        self._unwritten = []
        return True

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def note_checkpoint(self, trainer: Trainer, step: int, path: Path, health: dict[str, Any]) -> None:
        """Write down a checkpoint that is about to be written, so that none is unknown after a kill."""
        self.add(trainer, step, "checkpoint", done={"path": relative(self.folder, path), **health})

    def usable(self, trainer: Trainer, candidates: Sequence[Saved]) -> Saved | None:
        """The first of some checkpoints that is there and whole."""
        found: Saved | None = None
        wait_for_saves(trainer)  # else the choice would depend on how fast the disk is
        if trainer.is_global_zero:
            found = next((s for s in candidates if files.damage(path_of(self.folder, s.path)) is None), None)
        result: Saved | None = trainer.strategy.broadcast(found)
        return result

    def to_go_back_to(self, keep: int, named: set[int | None]) -> set[Path]:
        """The newest healthy checkpoints that are there, so many, and those of named steps."""
        saved = [(one, path_of(self.folder, one.path)) for one in self.now.saved]
        healthy = [path for one, path in saved if one.healthy and path.exists()]
        return {*healthy[-keep:], *(path for one, path in saved if one.step in named)}

    def set_aside(self, trainer: Trainer) -> None:
        """Rename what the last rewind left behind, ``NAME.branch-N``, so that nothing takes it for the run's own.

        Done before the new branch trains, and again after a kill in between: what is renamed already stays. So do those
        of another run, which this one began from: they are that one's own.
        """
        now = self.now
        if trainer.is_global_zero and now.pending is not None:
            for saved in now.abandoned:
                path = path_of(self.folder, saved.path)
                if self._is_of_another_run(path):
                    continue
                files.recover(path)  # or the older one that an interrupted replacement left comes back under this name
                aside = path.with_name(f"{path.name}.branch-{now.pending.branch}")
                if path.exists() and not aside.exists():
                    path.rename(aside)
                    rank_zero_info(f"Recovery: {path} is of the branch that was left; it is {aside.name} now.")
        trainer.strategy.barrier()

    def _is_of_another_run(self, path: Path) -> bool:
        """Whether a ledger lies beside it that is not this one."""
        places = {place.resolve() for place in (path.parent, path.parent.parent) if (place / FILE).is_file()}
        return bool(places) and self.folder.resolve() not in places


def ledger_folders(trainer: Trainer, own: Path) -> list[Path]:
    """Folders that may hold the ledger of the checkpoint that is loaded: a run's own, and those around the file."""
    loaded = [c.loaded for c in trainer.callbacks if isinstance(c, SafeCheckpoints)]  # type: ignore[attr-defined]
    return [own, *(place for path in loaded for place in (path.parent, path.parent.parent))]


def _with_paths_from(source: Path, folder: Path, entry: Entry) -> Entry:
    """The same line for a ledger in another folder."""
    if "path" not in entry.done:
        return entry
    path = relative(folder, path_of(source, entry.done["path"]))
    return Entry(**{**vars(entry), "done": {**entry.done, "path": path}})
