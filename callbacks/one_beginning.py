"""All ranks begin with one checkpoint, or none of them begins."""

from __future__ import annotations

from pathlib import Path

from .base import MisconfigurationException
from .rank_gather import gather_objects, this_rank


def refuse_beginnings_that_differ(path: Path | str | None) -> None:
    """Raise on all ranks where they have found different checkpoints to go on from; called by all of them.

    Each rank looks for it by itself. On nodes that do not share the folder of the run, or see a file late, one would
    begin at step 0 while another waits for it in a load.

    Args:
        path: What this rank has found; ``None``: nothing, it begins at the start.
    """
    (zeroth, first), *others = gather_objects((this_rank(), "" if path is None else str(path)))
    for rank, other in others:
        if other != first:
            raise MisconfigurationException(
                f"{rank} begins {_with(other)}, {zeroth} {_with(first)}: they do not see the same files; put the run's"
                " folder where all nodes see it, or name a checkpoint that all have."
            )


def _with(path: str) -> str:
    return f"with {path}" if path else "at the start"
