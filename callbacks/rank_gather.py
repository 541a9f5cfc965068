"""The same thing of every rank, side by side."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_ranks(tensor: Tensor) -> Tensor:
    """(...) on each rank -> (world, ...) on all, in the order of ranks: one collective, none on one process.

    For small tensors whose ranks' parts are to be combined in more than one way (sums beside maxima), or named.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor[None]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return torch.stack(gathered)


def gather_objects(thing: Any) -> list[Any]:
    """What can be pickled, of every rank, in the order of ranks; for rare occasions, since the host waits for it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [thing]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing)
    return gathered


def this_rank() -> str:
    """Who this is, as messages name it: ``rank 2 on HOST``."""
    return f"rank {dist.get_rank() if dist.is_initialized() else 0} on {socket.gethostname()}"
