"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.2), half-split pairs, phases in fp32."""

from __future__ import annotations

import torch


class Rotary:
    """Cosines and sines of every position of one forward pass, with the rotation they define.

    Made anew for each forward pass instead of kept in buffers: a model-wide cast, a mixed-precision wrapper or an
    unfilled meta tensor has nothing to spoil, and the cost is a few kernels on (T, K/2) numbers. bf16 would merge
    positions above 256.

    It is a plain object on purpose. Sharding wrappers look for tensors in the tuples, dicts and dataclasses among a
    block's inputs and round what they find to the compute dtype.

    Args:
        length: Number of positions T.
        head_size: Width K of a head, even.
        theta: Base of the wavelengths; pair i turns by theta^(-2i/K) radians per position.
        device: Where the tables live.
    """

    def __init__(self, length: int, head_size: int, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
        positions = torch.arange(length, device=device, dtype=torch.float32)
        phases = positions[:, None] * theta**-exponents  # (T, K/2)
        self.cos, self.sin = phases.cos(), phases.sin()

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turn the pairs (x_i, x_{i+K/2}) of x, (B, T, H, K), by their position's phase; computed in fp32."""
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]  # (T, 1, K/2): one phase for all heads
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
