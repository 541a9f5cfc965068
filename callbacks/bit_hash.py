"""A number that changes with any bit of a tensor, computed where the tensor is."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements at a time: 64 MiB of integers
_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_hash(tensor: Tensor) -> Tensor:
    """0-d int64: the sum of all elements' bits, read as integers, times odd weights by position, modulo 2^64.

    Any change of one bit changes it, with certainty: 2^b times an odd number is never 0 modulo 2^64. NaNs of other
    bits, and zeros of other sign, differ.
    """
    bits = tensor.detach().contiguous().view(-1).view(_AS_INTEGER[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        weights = torch.arange(start, start + part.numel(), device=tensor.device).mul_(2).add_(1)
        # Neighbours' weights lie far apart, so that changes of two elements hardly cancel.
        total = total + (part * weights.mul_(0x2545F4914F6CDD1D)).sum()
    return total
