"""Shuffle any number of items without a table of them.

A permutation of [0, size) that is evaluated at single indices: a Feistel network on the smallest power of two that
holds ``size``, made exact by cycle walking (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
section 4). Memory does not depend on ``size``, so a corpus of 10^11 samples is shuffled as cheaply as one of 10.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lit_stable.callbacks.seeds import mix

Indices = npt.NDArray[np.int64]

# Four rounds with independent random functions are already a strong pseudo-random permutation (Luby and Rackoff 1988);
# halves of a few bits are far from that theorem, so two more are spent.
ROUNDS = 6


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014) on every element; uint64 products wrap around by design."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


class Permutation:
    """A pseudo-random bijection of [0, size), chosen by ``key``.

    Args:
        size: Number of items, 1 to 2^62.
        key: Any integer; another key gives another order.

    Raises:
        ValueError: when ``size`` is out of range.

    Example::

        >>> sorted(Permutation(5, key=7)(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"Permutation(size={size}): must be between 1 and 2^62.")
        self.size = size
        bits = (size - 1).bit_length()
        # Halves may differ by one bit: the domain is then below 2 * size and a walk takes less than 2 steps on average.
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._round_keys = [np.uint64(mix(key, number)) for number in range(ROUNDS)]

    def __call__(self, indices: Indices) -> Indices:
        """Images of ``indices`` (any shape (N,), each in [0, size)), as int64 (N,)."""
        values = self._network(indices.astype(np.uint64))
        outside = values >= np.uint64(self.size)
        while outside.any():
            values[outside] = self._network(values[outside])
            outside = values >= np.uint64(self.size)
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high, low = values >> self._low_bits, values & self._low_mask
        for number, key in enumerate(self._round_keys):
            if number % 2 == 0:
                high = high ^ (_scramble(low + key) & self._high_mask)
            else:
                low = low ^ (_scramble(high + key) & self._low_mask)
        joined: npt.NDArray[np.uint64] = (high << self._low_bits) | low
        return joined
