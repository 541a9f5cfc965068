from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.parameter_order import difference, in_todays_order, names_by_group

A, B, C, D = "a.weight", "a.bias", "b.weight", "b.bias"


def stepped(*groups: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam after one step in which every parameter's gradient was its own number, so that moments tell them apart."""
    optimizer = torch.optim.Adam([{"params": group} for group in groups], lr=0.0)
    for parameter in (p for group in groups for p in group):
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


@pytest.fixture
def module() -> nn.Module:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    for number, parameter in enumerate(module.parameters(), 1):
        nn.init.constant_(parameter, float(number))
    return module


def moments(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(optimizer.state[p]["exp_avg"].flatten()[0]) for g in optimizer.param_groups for p in g["params"]]


def test_names_are_those_without_wrappers_by_group(module: nn.Module) -> None:
    compiled = nn.ModuleDict({"_orig_mod": module})
    a, b = module["a"], module["b"]
    optimizer = torch.optim.SGD([{"params": [a.weight, b.weight]}, {"params": [b.bias]}])
    assert names_by_group(optimizer, compiled) == [[A, C], [D]]


def test_an_optimizer_of_somebody_elses_parameters_has_no_names_and_loads_as_it_is(module: nn.Module) -> None:
    optimizer = torch.optim.SGD([module["a"].weight, nn.Parameter(torch.ones(1))])
    assert names_by_group(optimizer, module) is None
    checkpoint = {"optimizer_states": [{"param_groups": [{"params": [0, 1]}]}]}
    assert in_todays_order(Path("x"), checkpoint, [None], [[[A, B]]]) == checkpoint
    assert in_todays_order(Path("x"), checkpoint, [[[A, B]]], [None]) == checkpoint


def test_torch_alone_gives_parameters_of_equal_shape_each_others_moments(module: nn.Module) -> None:
    """The fault that all this is about."""
    a, b = module["a"].weight, module["b"].weight
    saved = stepped([a, b]).state_dict()
    swapped = torch.optim.Adam([b, a])
    swapped.load_state_dict(saved)
    assert moments(swapped) == pytest.approx([0.1, 0.3])  # b has what was a's


def test_another_order_within_groups_is_put_right(module: nn.Module) -> None:
    weights, biases = [module["a"].weight, module["b"].weight], [module["a"].bias, module["b"].bias]
    before = stepped(weights, biases)
    checkpoint: dict[str, Any] = {"optimizer_states": [before.state_dict()], "epoch": 3}
    kept = copy.deepcopy(checkpoint)
    today = torch.optim.Adam([{"params": weights[::-1]}, {"params": biases[::-1]}], lr=0.0)
    saved, found = [names_by_group(before, module)], [names_by_group(today, module)]
    ordered = in_todays_order(Path("x.ckpt"), checkpoint, saved, found)
    today.load_state_dict(ordered["optimizer_states"][0])
    assert moments(today) == pytest.approx([0.3, 0.1, 0.4, 0.2])
    assert ordered["epoch"] == 3
    assert str(checkpoint) == str(kept), "the argument was changed"


def test_groups_that_changed_places_are_refused_with_the_first_parameter(module: nn.Module) -> None:
    saved, found = [[[A, C], [B, D]]], [[[B, D], [A, C]]]
    state = {"param_groups": [{"params": [0, 1]}, {"params": [2, 3]}]}
    with pytest.raises(
        CheckpointError, match=r"^x.ckpt: a.bias stands in group 1 of its optimizer and in group 0 toda"
    ):
        in_todays_order(Path("x.ckpt"), {"optimizer_states": [state]}, saved, found)
    with pytest.raises(CheckpointError, match=r"a.bias stands in group 1"):  # sharded: rates go by the group's place
        in_todays_order(Path("x.ckpt"), {}, saved, found)


@pytest.mark.parametrize(
    ("saved", "found", "by_place", "expected"),
    [
        ([[A, B]], [[B, A]], True, None),
        ([[A], [B]], [[A, B]], True, "a.bias stands in group 1 of its optimizer and in group 0 today"),
        ([[A]], [[A, B]], True, "a.bias stands in no group of its optimizer and in group 0 today"),
        ([[A, B]], [[A]], True, "a.bias stands in group 0 of its optimizer and in no group today"),
        ([[A]], [[A, B]], False, None),  # by name the rest still finds its own
        ([[A, B]], [[A]], False, None),
        ([[A], [B]], [[B]], False, "a.bias stands in group 1 of its optimizer and in group 0 today"),
    ],
)
def test_the_first_difference_is_told(saved: Any, found: Any, by_place: bool, expected: str | None) -> None:
    assert difference(saved, found, by_place) == expected


def test_a_state_that_names_its_parameters_is_left_as_it_is() -> None:
    state = {"state": {A: {}}, "param_groups": [{"params": [A, B]}]}
    checkpoint = {"optimizer_states": [state]}
    assert in_todays_order(Path("x"), checkpoint, [[[A, B]]], [[[B, A]]]) == checkpoint
