"""One factor per head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_stable.model.config import GPTConfig
from lit_stable.model.head_scale import HeadScale
from lit_stable.model.norm import is_norm_or_gain


@pytest.mark.parametrize("gain", ["one", "zero_centred"])
def test_each_head_is_multiplied_by_its_factor_in_fp32(gain):
    scale = HeadScale(GPTConfig(d_model=32, n_head=4, norm_gain=gain))
    factors = torch.tensor([1.0, 0.5, 2.0, 1 + 2**-8])  # the last is 1 in bf16
    scale.weight.data = factors - 1 if gain == "zero_centred" else factors
    y = torch.randn(2, 3, 4, 8)
    torch.testing.assert_close(scale(y), y * factors[:, None])
    y = torch.full((1, 1, 4, 8), 1.9921875).bfloat16()  # next to 2, where the last factor tips the rounding
    assert scale(y)[0, 0, 3, 0] != y[0, 0, 3, 0]
    assert scale(y).dtype == torch.bfloat16


def test_it_counts_as_a_gain():
    assert is_norm_or_gain(HeadScale(GPTConfig()))
    assert not is_norm_or_gain(nn.Identity())
