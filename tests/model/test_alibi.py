"""ALiBi's slopes and what they add to scores."""

from __future__ import annotations

import math

import pytest
import torch

from lit_stable.model.alibi import alibi_bias, alibi_slopes


def test_slopes_of_a_power_of_two_are_the_published_series():
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("heads", [3, 12, 40, 112])  # 40: BloombergGPT, 112: BLOOM
def test_slopes_of_other_numbers_fill_up_from_the_next_power_of_two(heads):
    lower = 2 ** int(math.log2(heads))
    base, extra = 2 ** -(2 ** -(math.log2(lower) - 3)), 2 ** -(2 ** -(math.log2(2 * lower) - 3))
    expected = [base**power for power in range(1, lower + 1)]
    expected += [extra**power for power in range(1, 2 * (heads - lower) + 1, 2)]
    assert alibi_slopes(heads).tolist() == pytest.approx(expected, rel=1e-6)


def test_bias_grows_with_distance_at_the_heads_slope():
    bias = alibi_bias(alibi_slopes(2), 4)  # slopes 1/16 and 1/256
    assert bias.dtype == torch.float32
    assert bias[0, 3].tolist() == [-3 / 16, -2 / 16, -1 / 16, 0.0]
    assert bias[1, 2, :3].tolist() == [-2 / 256, -1 / 256, 0.0]


def test_slopes_are_made_once_for_each_number_and_device():
    assert alibi_slopes(8) is alibi_slopes(8)
