from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lit_stable.callbacks.parameter_places import component_of, layer_of
from lit_stable.callbacks.parameter_sums import Grouping, ParameterSums


def sums_of(names: list[str]) -> ParameterSums:
    return ParameterSums({name: nn.Parameter(torch.full((2,), float(i + 1))) for i, name in enumerate(names)})


NAMES = ["net.wte.weight", "net.blocks.0.up.weight", "net.blocks.0.up.bias", "net.blocks.10.up.weight", "scale"]


def test_layers_and_components_by_name() -> None:
    assert [layer_of(n) for n in NAMES] == ["net.wte", "net.blocks.0", "net.blocks.0", "net.blocks.10", "scale"]
    assert [component_of(n) for n in NAMES] == [
        "net.wte.weight",
        "net.blocks.up.weight",
        "net.blocks.up.bias",
        "net.blocks.up.weight",
        "scale",
    ]


def test_squares_of_parameters_and_none() -> None:
    sums = sums_of(NAMES)
    assert sums.squares(sums.parameters).tolist() == pytest.approx([2.0, 8.0, 18.0, 32.0, 50.0])
    assert sums.squares([None, torch.ones(3), None, None, None]).tolist() == pytest.approx([0.0, 3.0, 0.0, 0.0, 0.0])
    assert sums.sizes.tolist() == [2.0] * 5


def test_groups_add_up_and_the_last_is_the_whole() -> None:
    sums = sums_of(NAMES)
    groups = Grouping(sums, per_tensor=False)
    added = dict(zip(groups.labels, groups.add_up(torch.arange(5.0)).tolist(), strict=True))
    assert added["_layer/net.blocks.0"] == 3.0
    assert added["_component/net.blocks.up.weight"] == 4.0
    assert (groups.labels[-1], added[""]) == ("", 10.0)
    assert dict(zip(groups.labels, groups.sizes.tolist(), strict=True))[""] == 10.0
    assert len(Grouping(sums, per_tensor=True).labels) == len(groups.labels) + 5


def test_a_nan_stays_in_its_groups() -> None:
    groups = Grouping(sums_of(NAMES), per_tensor=False)
    added = dict(zip(groups.labels, groups.add_up(torch.tensor([1.0, math.nan, 1.0, 1.0, 1.0])).tolist(), strict=True))
    assert {label for label, value in added.items() if math.isnan(value)} == {
        "_layer/net.blocks.0",
        "_component/net.blocks.up.weight",
        "",
    }


def test_bf16_is_summed_in_fp32() -> None:
    sums = ParameterSums({"a": nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))})
    assert sums.squares(sums.parameters).tolist() == [1 << 14]


def test_no_parameters_at_all() -> None:
    sums = ParameterSums({})
    assert sums.squares([]).shape == (0,)
    assert Grouping(sums, per_tensor=True).add_up(torch.zeros(0)).shape == (0,)
