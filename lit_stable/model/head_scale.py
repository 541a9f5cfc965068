"""NormFormer's learned factor on the output of each attention head."""

from __future__ import annotations

import torch
from torch import nn

from lit_stable.model.config import GPTConfig
from lit_stable.model.norm import Gain, gain


class HeadScale(Gain):
    """One factor per head on what the head has gathered, before the output projection.

    Source: Shleifer et al. 2021, arXiv:2110.09456, HeadScaleMHA.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.zero_centred = config.norm_gain == "zero_centred"
        self.weight = nn.Parameter(torch.empty(config.n_head))
        self.first_head = 0  # of those on this device

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """y (B, T, H, K) -> (B, T, H, K), in its dtype."""
        weight = self.weight[self.first_head : self.first_head + y.shape[2]]
        factors = gain(weight, self.zero_centred)[:, None]  # (H, 1)
        return (y.float() * factors).to(y.dtype)
