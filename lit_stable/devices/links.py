"""What ranks send each other: is it what arrives, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Send = Callable[[Tensor], Tensor]

#: Bytes of the tensor that is added up.
SIZE = {"cuda": 1 << 28, "cpu": 1 << 20}


@dataclass
class LinkTest:
    """What a rank found about the others."""

    wrong_sums: int = 0
    """How many sums over all ranks came out wrong here."""
    bad_senders: list[int] = field(default_factory=list)
    """Ranks whose data came wrong here, sent to all."""
    wrong_from_before: bool = False
    """Whether what the rank before this one sent around the ring came wrong."""
    all_reduce_gbs: float = 0.0
    """Bus bandwidth in 1e9 bytes a second: bytes x 2 (n - 1) / n over the time."""
    next_gbs: float = 0.0
    """From this rank to the next, in a ring in which all send at once."""


def try_links(device: torch.device, rounds: int = 5, sent: Send = lambda tensor: tensor) -> LinkTest:
    """Add up a tensor over all ranks, let each send one to all, and send around the ring; all ranks call it.

    Args:
        device: Of this rank.
        rounds: How often the sum is taken, >= 1.
        sent: What becomes of this rank's tensor before it leaves: for drills.
    """
    found, rank, size = LinkTest(), dist.get_rank(), dist.get_world_size()
    elements = SIZE.get(device.type, SIZE["cpu"]) // 4
    seconds = 0.0
    for _ in range(rounds):
        tensor = sent(_pattern(elements, rank, device))
        seconds = _timed(device, lambda tensor=tensor: dist.all_reduce(tensor))  # type: ignore[misc]
        expected = torch.stack([_pattern(elements, other, device) for other in range(size)]).sum(0)
        found.wrong_sums += not torch.equal(tensor, expected)
    found.all_reduce_gbs = 4 * elements * 2 * (size - 1) / size / seconds / 1e9
    found.bad_senders = _bad_senders(elements // 16, device, sent)
    found.next_gbs = _ring(found, elements, device, sent)
    return found


def _pattern(elements: int, rank: int, device: torch.device) -> Tensor:
    """(elements,) fp32 whole numbers below 1024, other ones for each rank: their sums are exact."""
    return (torch.arange(elements, device=device) * (2 * rank + 1) % 1021).float()


def _bad_senders(elements: int, device: torch.device, sent: Send) -> list[int]:
    bad = []
    for sender in range(dist.get_world_size()):
        expected = _pattern(elements, sender, device)
        tensor = sent(expected.clone()) if sender == dist.get_rank() else torch.empty_like(expected)
        dist.broadcast(tensor, src=sender)
        if not torch.equal(tensor, expected):
            bad.append(sender)
    return bad


def _ring(found: LinkTest, elements: int, device: torch.device, sent: Send) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % size, (rank + 1) % size
    out, arrived = sent(_pattern(elements, rank, device)), torch.empty(elements, device=device)

    def exchange() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, arrived, before)]
        ):
            work.wait()

    exchange()  # the first one connects
    seconds = _timed(device, exchange)
    found.wrong_from_before = not torch.equal(arrived, _pattern(elements, before, device))
    return 4 * elements / seconds / 1e9


def _timed(device: torch.device, function: Callable[[], Any]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
