"""Which window of which source stands at a position of the endless sample stream.

The stream is cut into blocks of 65 536 positions. Each block holds the same exact number of samples of every source
(its quota), in an order of its own. The n-th sample of a source, counted along the whole stream, is the n-th window of
that source's shuffled epochs, so an epoch of a source is finished before its next one begins. Everything follows from
(seed, position): nothing is stored, no generator is advanced, and any position is reached at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from lit_stable.callbacks.seeds import mix
from lit_stable.data.order import Indices, Permutation

BLOCK = 65_536


def quotas(weights: Sequence[float]) -> list[int]:
    """Samples of each source per block: ``weights`` scaled to sum to 65 536 by largest remainder.

    A positive weight never rounds to nothing: it gets at least 1, taken from the largest quota. Weight 0 gets 0.

    Raises:
        ValueError: when a weight is negative or not finite, all are 0, or there are more sources than places.
    """
    if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
        raise ValueError(f"weights={list(weights)}: must be finite, at least 0, and not all 0.")
    if sum(weight > 0 for weight in weights) > BLOCK:
        raise ValueError(f"{len(weights)} weighted sources: at most {BLOCK} fit in a block; merge some.")
    # Fractions keep the rounding exact, hence equal on all machines.
    total = sum(Fraction(weight) for weight in weights)
    shares = [Fraction(weight) * BLOCK / total for weight in weights]
    result = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda source: (result[source] - shares[source], source))
    for source in by_remainder[: BLOCK - sum(result)]:
        result[source] += 1
    for source, weight in enumerate(weights):
        if weight > 0 and result[source] == 0:
            result[result.index(max(result))] -= 1
            result[source] = 1
    return result


class Mixture:
    """The order of samples as a pure function of the position.

    Args:
        sources: Names of the sources, used in messages.
        weights: Share of each source in samples, any scale.
        num_windows: Number of windows in one epoch of each source.
        seed: The data seed; another seed gives another order.

    Raises:
        ValueError: when the lengths differ, a source has no window, or the weights are unusable (see ``quotas``).
    """

    def __init__(self, sources: Sequence[str], weights: Sequence[float], num_windows: Sequence[int], seed: int) -> None:
        if not len(sources) == len(weights) == len(num_windows):
            raise ValueError(f"{len(sources)} sources, {len(weights)} weights, {len(num_windows)} sizes: must agree.")
        empty = [name for name, count in zip(sources, num_windows, strict=True) if count < 1]
        if empty:
            raise ValueError(f"sources {', '.join(empty)}: hold not even one window; shorten sequence_length.")
        self.sources = list(sources)
        self.quotas = np.array(quotas(weights), dtype=np.int64)
        self.num_windows = np.array(num_windows, dtype=np.int64)
        self.seed = seed
        self._blocks: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = {}

    def locate(self, positions: Indices) -> tuple[Indices, Indices, Indices]:
        """Source, epoch of that source and window in it, each int64 (N,), at stream ``positions`` (N,)."""
        blocks, offsets = np.divmod(positions, BLOCK)
        sources, ranks = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks):
            here = blocks == block
            block_sources, block_ranks = self._block(int(block))
            sources[here], ranks[here] = block_sources[offsets[here]], block_ranks[offsets[here]]
        epochs, indices = np.divmod(blocks * self.quotas[sources] + ranks, self.num_windows[sources])
        windows = np.empty_like(positions)
        for source in np.unique(sources):
            for epoch in np.unique(epochs[sources == source]):
                here = (sources == source) & (epochs == epoch)
                shuffle = Permutation(int(self.num_windows[source]), mix(self.seed, int(source), int(epoch)))
                windows[here] = shuffle(indices[here])
        return sources, epochs, windows

    def _block(self, block: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Source and rank (how many samples of that source come before it in the block) of each of its positions.

        Ranks in order of appearance are what keeps epochs apart; they need the block as a table (512 KiB, a few
        milliseconds). Two are kept, since a batch may straddle a boundary.
        """
        if block not in self._blocks:
            while len(self._blocks) > 1:
                del self._blocks[next(iter(self._blocks))]
            slots = Permutation(BLOCK, mix(self.seed, block))(np.arange(BLOCK))
            sources = np.searchsorted(np.cumsum(self.quotas), slots, side="right")
            by_source = np.argsort(sources, kind="stable")
            ranks = np.empty(BLOCK, dtype=np.int32)
            firsts = np.cumsum(self.quotas) - self.quotas
            ranks[by_source] = np.arange(BLOCK) - firsts[sources[by_source]]
            self._blocks[block] = (sources.astype(np.int32), ranks)
        return self._blocks[block]
