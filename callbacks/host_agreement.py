"""What ranks agree on over a CPU process group: the device is neither read nor waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .private_names import collective_timeout

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class HostAgreement:
    """A gloo group of all ranks; on one process there is none, and everything is agreed on. All ranks call alike.

    Attributes:
        waiting: Entered while sums of other ranks are waited for, by whoever clocks what a rank does on its own.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._begun: Any = None  # the last sums, which may be under way
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_open(self) -> bool:
        """Whether there is anybody to agree with."""
        return self._group is not None

    def open(self, trainer: Trainer) -> None:
        """To be called in ``setup`` or ``on_train_start``; one that is open stays."""
        if trainer.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=collective_timeout(trainer))

    def largest(self, number: int) -> int:
        """The largest of the numbers of all ranks."""
        if self._group is None:
            return number
        flag = torch.tensor([number])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return int(flag.item())

    def begin_sums(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Begin to add up the numbers of all ranks; what is returned waits for the sums."""
        if self._group is None:
            return lambda: list(numbers)
        sums = torch.tensor(numbers)
        work = self._begun = dist.all_reduce(sums, group=self._group, async_op=True)

        def wait() -> list[int]:
            with self.waiting():
                work.wait()
            found: list[int] = sums.tolist()
            return found

        return wait

    def from_rank_0(self, thing: Any) -> Any:
        """What rank 0 has."""
        if self._group is None:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def close(self) -> None:
        """To be called in ``teardown``: no group is left, and nobody who clocks it."""
        # With sums under way, which a rank that is stuck never joins, to take the group down would wait for that rank.
        under_way = self._begun is not None and not self._begun.is_completed()
        if self._group is not None and dist.is_initialized() and not under_way:
            dist.destroy_process_group(self._group)
        self._group, self._begun, self.waiting = None, None, nullcontext
