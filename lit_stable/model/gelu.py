"""The exact GELU, of 16 bits on CUDA in a kernel of its own.

It stands between two matrix products, so a compiler has nothing to fuse it with; and the library's erf, of some 20
instructions, keeps it from running at the speed of the memory.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lit_stable.model.compute_dtype import SIXTEEN_BITS

LOG2_TAIL = (
    -0.9999953, -1.151251, 0.26288312, -0.053960066, 0.0085078899, -0.00093052467, 6.1598279e-05, -1.834811e-06,
)  # fmt: skip
"""Of the normal distribution the share above a >= 0 is 2^(p(a) - a^2 / 2 log2(e)) with this polynomial p, lowest power
first: that of degree 7 whose largest error on [0, 6] is least, 4.9e-6, so 3.4e-6 of the share. Farther out it falls
faster than the share does, and both are below 1e-9."""


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's share below x (Hendrycks & Gimpel 2016, arXiv:1606.08415).

    In 16 bits on CUDA that share is off by at most 2e-6, and below zero by at most 1e-5 of itself down to -6, before
    the result is rounded once. The library's, made of 1 + erf in fp32, is 4 % off at -5 and 57 % at -5.5, and 0
    from -6 on.

    Args:
        x: Any shape and floating dtype; the result has both.
    """
    if x.is_cuda and x.dtype in SIXTEEN_BITS:
        from lit_stable.model.gelu_kernel import short_gelu

        short: Tensor = short_gelu(x)
        return short
    return F.gelu(x)
