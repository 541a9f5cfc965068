"""What stands beside the checkpoints of a run: which one is best, and which stay for ever."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from lit_stable.callbacks.base import rank_zero_warn
from lit_stable.callbacks.whole_file import write_whole

_BEST, _MILESTONES = "best.json", "milestones.json"
T = TypeVar("T")


class CheckpointNotes:
    """Two small files. Which one is best is not written inside it: one is often saved just before it is validated.

    Where a file cannot be read, whatever it may have named stays: all the checkpoints that there are.

    Args:
        folder: The checkpoints'.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unread: list[Path] = []

    def read_best(self) -> tuple[int, float] | None:
        """(step, validation loss) of the best; ``None`` without one."""
        return self._read(_BEST, lambda found: (int(found["step"]), float(found["loss"])))

    def write_best(self, step: int, loss: float) -> None:
        """Note which is best, once it is on disk."""
        self._write(_BEST, {"step": step, "loss": loss})

    def read_milestones(self) -> dict[int, str]:
        """By step, why its checkpoint stays."""
        return self._read(_MILESTONES, lambda found: {int(k): str(v) for k, v in found.items()}) or {}

    def write_milestones(self, kept: dict[int, str]) -> None:
        """Note which stay."""
        self._write(_MILESTONES, kept)

    def spare(self, kept: dict[int, str], steps: Iterable[int]) -> dict[int, str]:
        """What stays, for later sessions too: also all these steps where a file that said so could not be read."""
        if not self._unread:
            return kept
        for path in filter(Path.is_file, self._unread):  # somebody may make it out
            shutil.copyfile(path, path.with_name(f"{path.name}.unreadable"))
        reason = f"{' and '.join(path.name for path in self._unread)} could not be read"
        kept = {**dict.fromkeys(steps, reason), **kept}
        self.write_milestones(kept)
        for path in self._unread:  # only now: a kill before this is told of once more
            if path.name != _MILESTONES and path.is_file():
                path.unlink()
        return kept

    def _write(self, name: str, content: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / name, json.dumps(content))

    def _read(self, name: str, read: Callable[[Any], T]) -> T | None:
        path = self._folder / name
        if not path.exists():
            return None
        try:
            return read(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._unread.append(path)
            rank_zero_warn(
                f"{path}: cannot be read ({' '.join(str(error).split())}) and says which checkpoints to keep, so all"
                " that there are stay; delete those that you do not need, by hand."
            )
            return None
