from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lit_stable.callbacks.qk_scaling import (
    ScalesQueriesKeys,
    head_factors,
    normalises,
    rows_to_scale,
    scale_rows,
    split_factors,
)


def test_only_a_finite_logit_above_the_threshold_is_scaled_and_down_to_it() -> None:
    largest = torch.tensor([50.0, 100.0, 200.0, math.inf, math.nan, -math.inf])
    assert head_factors(largest, 100.0).tolist() == [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]


def test_with_a_key_head_each_both_take_the_root() -> None:
    q, k = split_factors(torch.tensor([0.25, 1.0]), key_heads=2)
    assert (q.tolist(), k.tolist()) == ([0.5, 1.0], [0.5, 1.0])


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_whatever_the_groups_the_products_are_the_factors(key_heads: int) -> None:
    factors = torch.tensor([0.25, 1.0, 0.64, 0.81])
    q, k = split_factors(factors, key_heads)
    assert len(k) == key_heads
    torch.testing.assert_close(q * k.repeat_interleave(4 // key_heads), factors)


def test_a_group_without_need_keeps_every_bit_and_one_with_gives_the_shared_key_the_most_it_needs() -> None:
    q, k = split_factors(torch.tensor([1.0, 1.0, 0.25, 1.0]), key_heads=2)
    assert (q.tolist(), k.tolist()) == ([1.0, 1.0, 0.5, 2.0], [1.0, 0.5])


class Llamalike(nn.Module):
    """Four query heads of two, two key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, rows) for rows in (8, 4, 4))


def test_two_projections_are_known_by_their_names() -> None:
    module = Llamalike()
    found = rows_to_scale(module, 4)
    assert found is not None
    key_heads, rows = found
    assert key_heads == 2
    (q, of_q), (k, of_k) = rows.rows_of_heads(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0]))
    assert (q, k) == (module.q_proj, module.k_proj)
    assert (of_q.tolist(), of_k.tolist()) == ([1, 1, 2, 2, 3, 3, 4, 4], [5, 5, 6, 6])
    assert isinstance(rows, ScalesQueriesKeys)
    assert rows_to_scale(nn.Linear(2, 2), 1) is None


def test_rows_of_weight_and_bias_are_scaled_in_place() -> None:
    layer = nn.Linear(3, 2)
    weight, bias, place = layer.weight.detach().clone(), layer.bias.detach().clone(), layer.weight.data_ptr()
    scale_rows(layer, torch.tensor([1.0, 0.5]))
    assert layer.weight.data_ptr() == place
    assert torch.equal(layer.weight, weight * torch.tensor([[1.0], [0.5]]))
    assert torch.equal(layer.bias, bias * torch.tensor([1.0, 0.5]))
    with pytest.raises(ValueError, match="weight of Linear: has 2 rows and not 3"):
        scale_rows(layer, torch.ones(3))


def test_norms_behind_the_projections_are_seen() -> None:
    module = Llamalike()
    assert not normalises(module)
    module.q_norm = nn.Identity()
    assert not normalises(module)
    module.k_norm = nn.LayerNorm(2)
    assert normalises(module)
