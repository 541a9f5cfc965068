"""One integer hash for every place that derives randomness from a position."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Hash integers into one unsigned 64-bit integer; the same on every machine and Python version.

    SplitMix64's finaliser (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators") applied after
    each value is absorbed, so that ``mix(a, b)`` and ``mix(b, a)`` differ. Negative values are taken modulo 2^64.

    Example::

        >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
        (True, False)
    """
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
