"""All ranks begin with one checkpoint, or none of them begins."""

from __future__ import annotations

import socket
from pathlib import Path

import torch.distributed as dist

from .base import MisconfigurationException


def refuse_beginnings_that_differ(path: Path | str | None) -> None:
    """Raise on all ranks where they have found different checkpoints to go on from; called by all of them.

    Each rank looks for it by itself. On nodes that do not share the folder of the run, or see a file late, one would
    begin at step 0 while another waits for it in a load.

    Args:
        path: What this rank has found; ``None``: nothing, it begins at the start.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    found: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), "" if path is None else str(path)))
    host, first = found[0]
    for rank, (other_host, other) in enumerate(found):
        if other != first:
            raise MisconfigurationException(
                f"rank {rank} on {other_host} begins {_with(other)}, rank 0 on {host} {_with(first)}: they do not see"
                " the same files; put the run's folder where all nodes see it, or name a checkpoint that all have."
            )


def _with(path: str) -> str:
    return f"with {path}" if path else "at the start"
