"""The order of the windows of one source, epoch after epoch, as a function of how many were read before.

``shuffle`` permutes all windows of an epoch. ``shards`` permutes stretches of neighbouring windows and mixes those of a
few stretches at a time, as a loader does that holds some shards in memory. ``stored`` and ``date`` leave them as
they stand. From a reshuffle on, what is left of the epoch and all later epochs are shuffled as a whole, with another
seed: the windows that were read stay read, each other one still comes once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from lit_stable.callbacks.argument_types import judges_arguments
from lit_stable.callbacks.seeds import mix
from lit_stable.data.order import Indices, Permutation


@judges_arguments(ValueError, "data.order")
@dataclass(frozen=True)
class SampleOrder:
    """In which order a source is read.

    Args:
        by: ``shuffle``: any window may come at any time; ``shards``: those of a few shards at a time; ``stored``: as
            prepared; ``date``: as prepared, and refused unless that is by date.
        shard_windows: Neighbouring windows that make up a shard, >= 1.
        buffer_shards: Shards whose windows are mixed, >= 1.
        reshuffle: From where on what is left is shuffled anew, and the seed of it, as ``{115500 steps: 7}`` or
            ``{6M samples: 7}``.
    """

    by: Literal["shuffle", "shards", "stored", "date"] = "shuffle"
    shard_windows: int = 8192
    buffer_shards: int = 4
    reshuffle: dict[str, int] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What is wrong with the sizes."""
        return [
            f"data.order.{name}={getattr(self, name)}: must be at least 1."
            for name in ("shard_windows", "buffer_shards")
            if getattr(self, name) < 1
        ]


class Reshuffle(NamedTuple):
    """Behind so many samples, a new seed for all that has not come yet."""

    after: int
    seed: int


class SourceEpochs:
    """Which window of a source its n-th sample is.

    Args:
        num_windows: Windows of an epoch.
        order: How they are ordered.
        source: Number of the source, which makes its shuffles its own.
        seed: The data seed.
        reshuffles: In the counts of this source, ascending.
    """

    def __init__(
        self, num_windows: int, order: SampleOrder, source: int, seed: int, reshuffles: Sequence[Reshuffle] = ()
    ) -> None:
        self.num_windows = num_windows
        self._order, self._source, self._seed = order, source, seed
        self._reshuffles = list(reshuffles)

    def __call__(self, epoch: int, indices: Indices) -> Indices:
        """Windows of the samples with those ``indices`` (N,) in an epoch."""
        start = epoch * self.num_windows
        begun = bisect_right(self._reshuffles, start, key=lambda reshuffle: reshuffle.after)
        for after, seed in reversed(self._reshuffles[begun:]):
            if after < start + self.num_windows:
                indices = self._later(indices, after - start, mix(seed, self._source, epoch, after))
        if begun:
            return Permutation(self.num_windows, mix(self._reshuffles[begun - 1].seed, self._source, epoch))(indices)
        return self._as_ordered(epoch, indices)

    def _later(self, indices: Indices, first: int, key: int) -> Indices:
        """Permute those of the ``indices`` that are not below ``first`` among themselves."""
        result: Indices = indices.copy()
        later = indices >= first
        if later.any():
            result[later] = first + Permutation(self.num_windows - first, key)(indices[later] - first)
        return result

    def _as_ordered(self, epoch: int, indices: Indices) -> Indices:
        key = mix(self._seed, self._source, epoch)
        if self._order.by == "shuffle":
            return Permutation(self.num_windows, key)(indices)
        if self._order.by == "shards":
            return shuffle_shards(indices, self.num_windows, self._order.shard_windows, self._order.buffer_shards, key)
        return indices


def shuffle_shards(indices: Indices, size: int, shard: int, buffer: int, key: int) -> Indices:
    """A bijection of [0, size) that mixes only within ``buffer`` shards, which are drawn anew for each key.

    What does not fill a shard at the end of the source comes last, shuffled among itself.

    Args:
        indices: In [0, size), (N,).
        size: Number of items.
        shard: Items of a shard, which are neighbours.
        buffer: Shards that are mixed.
        key: Any integer.
    """
    shards = size // shard
    result: Indices = indices.copy()
    tail = indices >= shards * shard
    if tail.any():
        first = shards * shard
        result[tail] = first + Permutation(size - first, mix(key, 2))(indices[tail] - first)
    groups = np.where(tail, -1, indices // (shard * buffer))
    for group in np.unique(groups[~tail]).tolist():
        here = groups == group
        first = group * buffer  # of the drawn shards
        mixed = Permutation(min(buffer, shards - first) * shard, mix(key, 1, group))(indices[here] - first * shard)
        drawn = Permutation(shards, mix(key, 0))(first + mixed // shard)
        result[here] = drawn * shard + mixed % shard
    return result
