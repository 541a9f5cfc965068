"""A finite validation set: the same windows in the same batches every time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lit_stable.callbacks.ignored_label import IGNORED
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size
from lit_stable.data.order import Indices
from lit_stable.data.store import TokenStore
from lit_stable.data.stream import Batch, make_batch
from lit_stable.data.workers import make_loader


def validation_loaders(
    stores: Sequence[TokenStore], sequence_length: int, limit: int | None, micro_batch: int, trainer: Trainer
) -> list[DataLoader[Batch]]:
    """One loader per store, for this rank of a ``trainer``; the other arguments are those of ``ValidationWindows``."""
    rank, ranks = data_parallel_rank(trainer), data_parallel_size(trainer)
    windows = [
        ValidationWindows(store, sequence_length, limit, micro_batch=micro_batch, rank=rank, size=ranks)
        for store in stores
    ]
    # Without workers: reading a window costs less than starting a process.
    return [make_loader(each, 0, trainer.strategy.root_device) for each in windows]


class ValidationWindows(IterableDataset[Batch]):
    """Batches of validation windows of one data-parallel rank, for ``DataLoader(batch_size=None)``.

    ``source`` in each row is the index into the store's ``sources`` of the document in which the window begins.

    Every rank gets the same number of batches, as collectives in validation need: where windows run out, rows of
    ignored labels fill up. Sums over labels are thus the same for any number of ranks; means over batches are not.
    It is an iterable without length so that no distributed sampler is put on top of the split made here.

    Args:
        store: Where the windows come from.
        sequence_length: T.
        limit: Number of windows, evenly spread over the store; None: all.
        micro_batch: B, samples per rank.
        rank: Index among the data-parallel ranks.
        size: Number of data-parallel ranks.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        limit: int | None,
        *,
        micro_batch: int = 1,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        super().__init__()
        self.store = store
        self.sequence_length = sequence_length
        self.micro_batch = micro_batch
        self.rank = rank
        self.size = size
        available = store.num_windows(sequence_length)
        count = available if limit is None else min(limit, available)
        self.windows: Indices = np.arange(count) * available // count
        self.num_batches = math.ceil(count / (micro_batch * size))

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for batch in range(first, self.num_batches, step):
            yield self.read(batch)

    def read(self, batch: int) -> Batch:
        """This rank's batch of that number."""
        start = (batch * self.size + self.rank) * self.micro_batch
        windows = self.windows[start : start + self.micro_batch]
        tokens = np.zeros((self.micro_batch, self.sequence_length + 1), dtype=np.int64)
        sources = np.zeros(self.micro_batch, dtype=np.int64)
        for row, window in enumerate(windows.tolist()):
            tokens[row] = self.store.window(window, self.sequence_length)
            sources[row] = self.store.source_at(window * self.sequence_length)
        result = make_batch(tokens, sources)
        result["labels"][len(windows) :] = IGNORED
        return result

    def unigram_entropy(self) -> float:
        """Entropy in nats of the frequencies of the labels: no model that ignores context can have a lower loss."""
        counts = np.zeros(self.store.vocab_size, dtype=np.int64)
        for window in self.windows.tolist():
            labels = self.store.window(window, self.sequence_length)[1:]
            counts += np.bincount(labels, minlength=len(counts))
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())
