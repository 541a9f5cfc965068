"""The endless training stream: micro-batches in an order that depends on the number of consumed samples alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lit_stable.callbacks.ignored_label import IGNORED
from lit_stable.callbacks.positions import Range
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.mixture import Mixture
from lit_stable.data.order import Indices
from lit_stable.data.store import TokenStore

Batch = dict[str, Tensor]


def stream_positions(consumed: Indices, dropped: Sequence[Range]) -> Indices:
    """``stream_position`` of many consumed counts at once, int64 (N,); ``dropped`` sorted and merged."""
    positions: Indices = consumed.copy()
    for start, stop in dropped:
        positions[positions >= start] += stop - start
    return positions


class TokenStream(IterableDataset[Batch]):
    """Collated micro-batches of one data-parallel rank, for ``DataLoader(batch_size=None)``.

    Counting over all ranks, micro-batches take ``micro_batch * size`` consumed samples each from ``start`` on, rank
    after rank. So one optimizer step reads the same samples whatever the micro-batch, the ranks and the workers are.
    Nothing is counted here and there is no state: what workers fetched ahead cannot falsify the position, which
    belongs to whoever commits optimizer steps. There is no length either, since one would end the epoch early.

    Yields ``input_ids`` and ``labels`` (the next tokens), int64 (B, T), and ``source``, int64 (B,).

    Args:
        mixture: Says which window stands at a stream position.
        stores: The token store of each source of the mixture.
        sequence_length: T.
        start: Samples consumed by all ranks before the first micro-batch.
        dropped: Ranges of stream positions to leave out, sorted and merged.
        micro_batch: B, samples per rank.
        window_at: Under a batch-size ramp: (consumed samples, ranks) at the opening of an optimizer step -> its global
            batch and its micro-batch, in place of ``micro_batch``.
        mask_repeats: Which repetitions have no labels; None: all tokens are labels.
        rank: Index among the data-parallel ranks.
        size: Number of data-parallel ranks.
    """

    def __init__(
        self,
        mixture: Mixture,
        stores: Sequence[TokenStore],
        sequence_length: int,
        *,
        start: int = 0,
        dropped: Sequence[Range] = (),
        micro_batch: int,
        window_at: Callable[[int, int], tuple[int, int]] | None = None,
        mask_repeats: MaskRepeats | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        super().__init__()
        self.mixture = mixture
        self.stores = list(stores)
        self.sequence_length = sequence_length
        self.start = start
        self.dropped = list(dropped)
        self.micro_batch = micro_batch
        self.window_at = window_at
        self.mask_repeats = mask_repeats
        self.rank = rank
        self.size = size

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        # The loader asks its workers in turn, so taking every n-th micro-batch keeps their order.
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for positions in itertools.islice(self.positions(), first, None, step):
            yield self.read(positions)

    def positions(self) -> Iterator[Indices]:
        """Stream positions (B,) of this rank's micro-batches, endlessly."""
        opened = self.start
        while True:
            batch, micro_batch = self._window(opened)
            for consumed in range(opened + self.rank * micro_batch, opened + batch, micro_batch * self.size):
                yield stream_positions(np.arange(consumed, consumed + micro_batch), self.dropped)
            opened += batch

    def _window(self, consumed: int) -> tuple[int, int]:
        """Samples over all ranks until the micro-batch may change, and the micro-batch."""
        if self.window_at is None:
            return self.micro_batch * self.size, self.micro_batch
        return self.window_at(consumed, self.size)

    def read(self, positions: Indices) -> Batch:
        """The batch of the samples at stream ``positions`` (B,)."""
        sources, _, windows = self.mixture.locate(positions)
        tokens = np.empty((len(positions), self.sequence_length + 1), dtype=np.int64)
        for row, (source, window) in enumerate(zip(sources.tolist(), windows.tolist(), strict=True)):
            tokens[row] = self.stores[source].window(window, self.sequence_length)
        batch = make_batch(tokens, sources)
        if self.mask_repeats is not None:
            batch["labels"].numpy()[self.mask_repeats.mask(tokens)[:, 1:]] = IGNORED
        return batch


def make_batch(tokens: Indices, sources: Indices) -> Batch:
    """Inputs and next-token labels, (B, T), from windows of T + 1 ``tokens`` (B, T + 1)."""
    windows = torch.from_numpy(tokens)
    return {
        "input_ids": windows[:, :-1].contiguous(),
        # A copy, also of a single row, which is contiguous as it stands: who masks a label must not change an input.
        "labels": windows[:, 1:].clone(memory_format=torch.contiguous_format),
        "source": torch.from_numpy(sources),
    }
