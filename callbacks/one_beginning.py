"""All ranks begin with one checkpoint, or none of them begins."""

from __future__ import annotations

from pathlib import Path

from .base import MisconfigurationException
from .checkpoint_files import content_digest
from .rank_gather import gather_objects, this_rank


def refuse_beginnings_that_differ(path: Path | str | None) -> None:
    """Raise on all ranks where they have found different checkpoints to go on from; called by all of them.

    Each rank looks for it by itself. On nodes that do not share the folder of the run, or see a file late, one would
    begin at step 0 while another waits for it in a load, or with the weights of an older run of the same name.

    Args:
        path: What this rank has found; ``None``: nothing, it begins at the start.
    """
    found = "" if path is None else str(path)
    content = content_digest(Path(found)) if found and "://" not in found else ""
    (zeroth, first, first_content), *others = gather_objects((this_rank(), found, content))
    for rank, other, other_content in others:
        if other == first and other_content != first_content:
            raise MisconfigurationException(
                f"{found}: is another checkpoint for {rank} than for {zeroth}, as on disks of their own; put the run's"
                " folder where all nodes see it, or copy the one that is meant to all."
            )
        if other != first:
            raise MisconfigurationException(
                f"{rank} begins {_with(other)}, {zeroth} {_with(first)}: they do not see the same files; put the run's"
                " folder where all nodes see it, or name a checkpoint that all have."
            )


def _with(path: str) -> str:
    return f"with {path}" if path else "at the start"
