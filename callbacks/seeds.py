"""One integer hash for every place that derives randomness from a position, and torch's generators set to it."""

from __future__ import annotations

import torch

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


def seed_torch(seed: int, device: torch.device) -> None:
    """Set the generators of a fit on ``device`` as ``torch.manual_seed`` does.

    That one formats the stack for every kind of device that nothing has used yet, which in the depth of a fit costs
    milliseconds each time. On other devices than CPUs and CUDA's it is called.

    Args:
        seed: At most 64 bits, as torch takes it.
        device: Where the module is.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
