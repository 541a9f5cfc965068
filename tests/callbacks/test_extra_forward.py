from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tiny_fit import TinyModule, quiet_trainer

from lit_stable.callbacks.extra_forward import (
    evaluating,
    extra_forward,
    is_uncompiled,
    uncompiled,
    undisturbed_generators,
)


def draws() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


@pytest.mark.parametrize("fails", [False, True])
def test_every_generator_comes_out_as_it_went_in(fails: bool) -> None:
    seed()
    expected = draws()
    seed()
    try:
        with undisturbed_generators(torch.device("cpu")):
            draws()
            assert not fails
    except AssertionError:
        pass
    assert draws() == expected


def test_every_part_gets_its_own_mode_back() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(2))
    module[1].eval()
    with evaluating(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == [True, True, False]


def test_compiled_code_runs_as_it_was_written_and_hooks_inside_are_called() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    compiled = torch.compile(module, backend="eager")
    compiled(torch.ones(3, 2))
    calls: list[Any] = []
    handle = module[0].register_forward_hook(lambda *a: calls.append(a))
    with uncompiled():
        assert is_uncompiled()
        compiled(torch.ones(5, 2))
    assert not is_uncompiled()
    handle.remove()
    assert len(calls) == 1
    assert "torch._dynamo" in sys.modules


def test_a_batch_norm_learns_nothing_and_no_gradient_is_recorded() -> None:
    module = TinyModule()
    module.norm = torch.nn.BatchNorm1d(4)
    trainer = quiet_trainer()
    before = module.norm.running_mean.clone()
    with extra_forward(trainer, module):
        out = module.norm(torch.randn(3, 4))
    assert torch.equal(module.norm.running_mean, before)
    assert not out.requires_grad
    assert module.norm.training
