"""Logits: their cap, and the dtypes they meet. tests/model/test_gpt.py has the fp32 head in the whole model."""

from __future__ import annotations

import pytest
import torch

from lit_stable.model.config import GPTConfig
from lit_stable.model.head import Head
from lit_stable.model.soft_cap import soft_cap


def build(**fields) -> Head:
    torch.manual_seed(0)
    return Head(GPTConfig(vocab_size=20, d_model=8, n_head=2, **fields))


@pytest.mark.parametrize("fp32", [False, True])
def test_logits_stay_within_the_cap(fp32):
    hidden = 100 * torch.randn(2, 3, 8)
    plain, capped = build(head_fp32=fp32), build(head_fp32=fp32, logit_soft_cap=3.0)
    assert plain(hidden).abs().max() > 10
    assert capped(hidden).abs().max() <= 3.0
    torch.testing.assert_close(capped(hidden), soft_cap(plain(hidden), 3.0))


def test_a_stream_in_fp32_meets_rounded_weights():
    head, hidden = build(residual_fp32=True).bfloat16(), torch.randn(2, 3, 8)
    assert head(hidden).dtype == torch.bfloat16
    assert build(residual_fp32=True, head_fp32=True).bfloat16()(hidden).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert build(residual_fp32=True)(hidden).dtype == torch.bfloat16
