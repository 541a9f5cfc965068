"""A batch sampler for any map-style data set that goes on where a run stands and leaves out what is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

from .base import refuse_all
from .positions import stream_position
from .progress import Progress
from .seeds import mix
from .topology import data_parallel_rank, data_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ResumingBatches(Sampler[list[int]]):
    """Endless batches of indices of a data set, from where ``Progress`` stands, without what is dropped.

    The stream is epoch after epoch of the data set, each shuffled by (seed, epoch). Counting over all data-parallel
    ranks, a batch takes ``batch_size`` samples per rank, rank after rank, so that an optimizer step reads the same
    samples on any number of ranks. The position is read when iteration begins; there is no state, and no length.

    Give it as ``DataLoader(dataset, batch_sampler=ResumingBatches(...))`` in ``train_dataloader``, and
    ``Trainer(use_distributed_sampler=False, max_epochs=-1, max_steps=...)``. Memory: one permutation per epoch.

    Args:
        trainer: Whose progress it follows.
        size: Items in the data set, >= 1.
        batch_size: Items per rank and batch, >= 1.
        seed: Chooses the order.
        shuffle: False: each epoch in the data set's own order, but for what a rewind has reshuffled.

    Raises:
        MisconfigurationException: when a number is below 1.

    Example::

        >>> loader = DataLoader(data, batch_sampler=ResumingBatches(trainer, len(data), 8))  # doctest: +SKIP
    """

    leaves_out_dropped = True

    def __init__(self, trainer: Trainer, size: int, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        refuse_all(
            f"`ResumingBatches({name}={value})`: must be at least 1."
            for name, value in (("size", size), ("batch_size", batch_size))
            if value < 1
        )
        self.trainer, self.size, self.batch_size = trainer, size, batch_size
        self.seed, self.shuffle = seed, shuffle
        self._epochs: dict[int, list[int]] = {}

    def __iter__(self) -> Iterator[list[int]]:
        progress = Progress.of(self.trainer)
        rank, ranks = data_parallel_rank(self.trainer), data_parallel_size(self.trainer)
        dropped, reshuffles = list(progress.dropped), list(progress.reshuffles)
        self._epochs = {}
        consumed = progress.samples + rank * self.batch_size
        while True:
            places = [stream_position(consumed + i, dropped) for i in range(self.batch_size)]
            yield [self.index(place, reshuffles) for place in places]
            consumed += self.batch_size * ranks

    def index(self, position: int, reshuffles: list[tuple[int, int]]) -> int:
        """The item at a position of the stream."""
        epoch, place = divmod(position, self.size)
        if epoch not in self._epochs:
            self._epochs = {number: order for number, order in self._epochs.items() if number == epoch - 1}
            self._epochs[epoch] = self._order(epoch, reshuffles)
        return self._epochs[epoch][place]

    def _order(self, epoch: int, reshuffles: list[tuple[int, int]]) -> list[int]:
        order = _permutation(self.size, mix(self.seed, epoch)) if self.shuffle else list(range(self.size))
        for start, key in reshuffles:
            first, place = divmod(start, self.size)
            if first == epoch:  # what is left of the epoch that was being read; later ones are new anyway
                rest = order[place:]
                order = order[:place] + [rest[i] for i in _permutation(len(rest), key)]
        return order


def _permutation(size: int, key: int) -> list[int]:
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(key >> 1)).tolist()
    return order
