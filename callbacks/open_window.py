"""What was begun since the last optimizer step, and what it comes to over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .host_agreement import HostAgreement
from .topology import data_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class OpenWindow:
    """Micro-batches that have not stepped: their samples and tokens, which may differ from rank to rank.

    Batches may have other shapes on other ranks: padded to their own longest text, or the last ones of a data set. They
    are added up once per window on the host; the sum is begun before the backward pass.

    Args:
        ranks: Closed where batches are alike on all ranks.

    Attributes:
        batches: Micro-batches begun, on each rank.
        samples: Samples in them, as if all ranks had as many as this one.
        tokens: Tokens in them, likewise.
        has_loss: Whether any of them had a loss.
    """

    def __init__(self, ranks: HostAgreement) -> None:
        self._ranks = ranks
        self._world = self._data_parallel = 1
        self.clear()

    def clear(self) -> None:
        """Begin a new window."""
        self.batches = self.samples = self.tokens = 0
        self.has_loss = False
        self._sums: Callable[[], list[int]] | None = None

    def begin_fit(self, trainer: Trainer, module: LightningModule) -> None:
        """Let ranks talk unless they need not; all call it alike, once the processes are up."""
        hosts = (trainer.datamodule, module)  # type: ignore[attr-defined]
        if not any(getattr(host, "alike_on_ranks", False) for host in hosts):
            self._ranks.open(trainer)
        self._world, self._data_parallel = trainer.world_size, data_parallel_size(trainer)
        self.clear()

    def add(self, samples: int, tokens: int) -> None:
        """Count one micro-batch of this rank."""
        self.batches += 1
        self.samples += samples * self._data_parallel
        self.tokens += tokens * self._data_parallel

    def begin_sums(self) -> None:
        """Begin to add up over ranks: the last micro-batch of the window has begun."""
        if self._sums is None:
            self._sums = self._ranks.begin_sums([self.samples, self.tokens])

    def over_ranks(self) -> tuple[int, int]:
        """Samples and tokens that all data-parallel ranks have begun."""
        self.begin_sums()
        assert self._sums is not None
        samples, tokens = self._sums()
        added = self._world if self._ranks.is_open else 1  # each of them has counted for all
        return samples // added, tokens // added
