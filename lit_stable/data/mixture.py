"""Which window of which source stands at a position of the endless sample stream.

The stream is cut into blocks. Each block holds an exact number of samples of every source (its quota, ``weights``), in
an order of its own. The n-th sample of a source, counted along the whole stream, is the n-th window of that source's
epochs (``epochs``), so an epoch of a source is finished before its next one begins. Everything follows from the seed
and the position: nothing is stored, no generator is advanced, and any position is reached at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lit_stable.callbacks.seeds import mix
from lit_stable.data.epochs import Reshuffle, SampleOrder, SourceEpochs
from lit_stable.data.order import Indices, Permutation
from lit_stable.data.weights import Blocks, ConstantBlocks, quotas

SHUFFLED = SampleOrder()


class Mixture:
    """The order of samples as a pure function of the position.

    Args:
        sources: Names of the sources, used in messages.
        weights: Share of each source in samples, any scale; or the blocks of a schedule of them.
        num_windows: Number of windows in one epoch of each source.
        seed: The data seed; another seed gives another order.
        order: The order of windows within a source.
        reshuffles: Positions from which on what is left is shuffled anew, each with its seed; ascending.

    Raises:
        ValueError: when the lengths differ, a source has no window, or the weights are unusable (see ``quotas``).
    """

    def __init__(
        self,
        sources: Sequence[str],
        weights: Sequence[float] | Blocks,
        num_windows: Sequence[int],
        seed: int,
        order: SampleOrder = SHUFFLED,
        reshuffles: Sequence[Reshuffle] = (),
    ) -> None:
        blocks = ConstantBlocks(quotas(weights)) if isinstance(weights, Sequence) else weights
        if not len(sources) == len(blocks.quotas(0)) == len(num_windows):
            counts = len(sources), len(blocks.quotas(0)), len(num_windows)
            raise ValueError("{} sources, {} weights, {} sizes: must agree.".format(*counts))
        empty = [name for name, count in zip(sources, num_windows, strict=True) if count < 1]
        if empty:
            raise ValueError(f"sources {', '.join(empty)}: hold not even one window; shorten sequence_length.")
        self.sources = list(sources)
        self.num_windows = np.array(num_windows, dtype=np.int64)
        self.seed = seed
        self._blocks = blocks
        self._tables: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = {}
        counts_at = [self.counts(reshuffle.after) for reshuffle in reshuffles]
        self._epochs = [
            SourceEpochs(
                size,
                order,
                source,
                seed,
                [Reshuffle(int(c[source]), r.seed) for c, r in zip(counts_at, reshuffles, strict=True)],
            )
            for source, size in enumerate(num_windows)
        ]

    def locate(self, positions: Indices) -> tuple[Indices, Indices, Indices]:
        """Source, epoch of that source and window in it, each int64 (N,), at stream ``positions`` (N,)."""
        sources, ordinals = np.empty_like(positions), np.empty_like(positions)
        blocks = self._blocks.number(positions)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            offsets = positions[here] - self._blocks.start(block)
            block_sources, block_ranks = self._table(block)
            sources[here] = block_sources[offsets]
            ordinals[here] = self._blocks.before(block)[sources[here]] + block_ranks[offsets]
        epochs, indices = np.divmod(ordinals, self.num_windows[sources])
        windows = np.empty_like(positions)
        for source in np.unique(sources).tolist():
            for epoch in np.unique(epochs[sources == source]).tolist():
                here = (sources == source) & (epochs == epoch)
                windows[here] = self._epochs[source](epoch, indices[here])
        return sources, epochs, windows

    def counts(self, position: int) -> Indices:
        """Samples of each source before a stream ``position``, int64 (S,)."""
        block = int(self._blocks.number(np.array([position]))[0])
        sources = self._table(block)[0][: position - self._blocks.start(block)]
        counts: Indices = self._blocks.before(block) + np.bincount(sources, minlength=len(self.num_windows))
        return counts

    def _table(self, block: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Source and rank (how many samples of that source come before it in the block) of each of its positions.

        Ranks in order of appearance are what keeps epochs apart; they need the block as a table (512 KiB, a few
        milliseconds). Two are kept, since a batch may straddle a boundary.
        """
        if block not in self._tables:
            while len(self._tables) > 1:
                del self._tables[next(iter(self._tables))]
            self._tables[block] = _block_table(self._blocks.quotas(block), mix(self.seed, block))
        return self._tables[block]


def _block_table(block_quotas: Indices, key: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    ends = np.cumsum(block_quotas)
    size = int(ends[-1])
    slots = Permutation(size, key)(np.arange(size))
    sources = np.searchsorted(ends, slots, side="right")
    by_source = np.argsort(sources, kind="stable")
    ranks = np.empty(size, dtype=np.int32)
    ranks[by_source] = np.arange(size) - (ends - block_quotas)[sources[by_source]]
    return sources.astype(np.int32), ranks
