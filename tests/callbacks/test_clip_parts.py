from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lit_stable.callbacks.clip_parts import ClipParts


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)) for _ in range(12))
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight  # tied: one tensor, under its first name
        self.scale = nn.Parameter(torch.ones(()))


def parts(scope: Any, module: nn.Module | None = None, groups: Any = None) -> ClipParts:
    module = module or Net()
    return ClipParts(torch.optim.SGD(groups or module.parameters(), lr=1.0), scope, module)


def test_a_tensor_has_the_name_that_it_had_before_wrapping() -> None:
    names = [name for name, _ in Net().named_parameters()]
    assert parts("tensor").names == names
    wrapped = Net()
    wrapper = nn.Module()
    wrapper._orig_mod = wrapped.blocks[3]  # as torch.compile does
    wrapped.blocks[3] = wrapper
    assert parts("tensor", wrapped).names == names


def test_a_layer_is_a_numbered_block_or_else_the_module_that_owns_a_tensor() -> None:
    assert sorted(parts("layer").names) == sorted(["scale", "embedding", *(f"blocks.{i}" for i in range(12))])


def test_a_group_is_one_of_the_optimizers() -> None:
    module = Net()
    groups = [{"params": list(module.blocks.parameters())}, {"params": [module.scale, module.embedding.weight]}]
    made = parts("group", module, groups)
    assert made.names == ["group 0", "group 1"]
    each = torch.tensor([1.0] * 36 + [3.0, 4.0])
    assert made.norms(each, "l2").tolist() == [6.0, 5.0]


def test_a_pattern_makes_a_part_of_each_outermost_module_that_it_matches() -> None:
    assert parts(["blocks.*"]).names == ["rest", *(f"blocks.{i}" for i in range(12))]
    assert parts(["blocks", "blocks.*", "embedding"]).names == ["rest", "embedding", "blocks"]
    assert parts(["blocks.1*"]).names == ["rest", "blocks.1", "blocks.10", "blocks.11"]


def test_a_pattern_that_matches_nothing_is_refused_with_near_names() -> None:
    with pytest.raises(
        MisconfigurationException,
        match=r"`GradClip\(scope=.*\)`: pattern 'block': matches no module; names near it are blocks",
    ):
        parts(["embedding", "block"])


def test_a_parameter_from_outside_the_module_has_its_place_for_a_name() -> None:
    assert parts("tensor", Net(), [nn.Parameter(torch.ones(2))]).names == ["parameter 0.0"]


def test_norms_of_parts_are_those_of_their_tensors_together() -> None:
    each = torch.rand(38, generator=torch.Generator().manual_seed(0))
    layers = parts("layer")  # the scale first, the embedding, then three tensors for each block
    blocks = each[2:].reshape(12, 3)
    torch.testing.assert_close(layers.norms(each, "l2"), torch.cat([each[:2], blocks.norm(dim=1)]))
    assert torch.equal(layers.norms(each, "inf"), torch.cat([each[:2], blocks.amax(dim=1)]))
    assert torch.equal(parts("tensor").norms(each, "inf"), each)
    each[4] = math.inf
    assert torch.isfinite(layers.norms(each, "l2")).tolist() == [True, True, False] + [True] * 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_part_is_divided_by_its_own_number_and_one_leaves_every_bit(dtype: torch.dtype) -> None:
    module = Net().to(dtype)
    made = parts("layer", module)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    module.scale.grad = None
    before = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    divisors = torch.ones(14)
    divisors[made.names.index("blocks.7")] = 4.0
    made.divide(divisors)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, before[name] / (4 if name.startswith("blocks.7.") else 1)), name
