"""The arithmetic of pre-division, and who can be told of it; tests/distributed has two ranks."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tiny_gpt_run import equal_bits, fit, tiny_module
from torch import nn

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.module import GPTModule
from lit_stable.strategies import predivide
from lit_stable.strategies.predivide import Predivide, predivide_gradients, refuse_factor


def summed(summands: list[torch.Tensor]) -> torch.Tensor:
    """As a ring of ranks adds: in the dtype of the gradients."""
    total = summands[0].clone()
    for summand in summands[1:]:
        total += summand
    return total


def test_32_fp16_gradients_of_4000_overflow_a_plain_sum_and_not_a_divided_one():
    gradients = [torch.full((3,), 4000.0).half() for _ in range(32)]
    assert summed(gradients).isinf().all()
    mean = Predivide(32.0, 32)
    total = summed([mean.before(gradient.clone()) for gradient in gradients])
    torch.testing.assert_close(mean.after(total), torch.full((3,), 4000.0).half(), rtol=0.01, atol=0)


@pytest.mark.parametrize(("factor", "ranks"), [(1.0, 4), (2.0, 4), (32.0, 4), (3.0, 5), (0.5, 2)])
def test_the_result_is_the_mean_whatever_the_factor(factor, ranks):
    torch.manual_seed(0)
    gradients = [torch.randn(50) for _ in range(ranks)]
    mean = Predivide(factor, ranks)
    result = mean.after(summed([mean.before(gradient.clone()) for gradient in gradients]))
    torch.testing.assert_close(result, torch.stack(gradients).mean(0))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_out_of_range_is_refused(factor):
    with pytest.raises(ValueError, match=rf"gradient_predivide={factor}: must be a finite number > 0, or null\."):
        refuse_factor(factor)
    refuse_factor(None)


def test_a_strategy_that_cannot_be_told_is_refused():
    with pytest.raises(MisconfigurationException, match=r"gradient_predivide=32.0: FSDPStrategy cannot be told how"):
        predivide_gradients(FSDPStrategy(), 32.0, 2)
    with pytest.raises(MisconfigurationException, match=r"DDPStrategy cannot be told how to reduce gradients; take"):
        predivide_gradients(DDPStrategy(), 32.0, 2)  # nothing is wrapped yet


def test_a_torch_whose_shards_take_no_other_reduction_is_refused(monkeypatch):
    class Older(nn.Module):
        """As in torch 2.8."""

    monkeypatch.setattr(predivide, "FSDPModule", Older)
    strategy = ModelParallelStrategy()
    strategy._model = nn.Sequential(Older())  # type: ignore[assignment]
    strategy._device_mesh = SimpleNamespace(mesh_dim_names=("data_parallel", "tensor_parallel"))  # type: ignore
    with pytest.raises(MisconfigurationException, match=r"fully_shard of torch .* takes no other reduction; take"):
        predivide_gradients(strategy, 32.0, 2)


def test_ranks_that_hold_a_whole_copy_each_are_refused():
    strategy = ModelParallelStrategy()
    strategy._model = nn.Linear(1, 1)  # type: ignore[assignment]
    mesh = {"shard": SimpleNamespace(size=lambda: 1)}
    mesh = type("Mesh", (dict,), {"mesh_dim_names": ("replicate", "shard", "tensor_parallel")})(mesh)
    strategy._device_mesh = mesh
    with pytest.raises(MisconfigurationException, match=r"mesh\.replicate=2 each rank is a copy, .* take strategy ddp"):
        predivide_gradients(strategy, 32.0, 2)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
def test_one_rank_sums_nothing_and_says_so(strategy, caplog):
    def run(factor: float | None) -> dict[str, torch.Tensor]:
        config, schedule = tiny_module().config, tiny_module().schedule
        return fit(strategy, steps=2, module=GPTModule(config, schedule, gradient_predivide=factor)).weights

    plain = run(None)
    logging.getLogger("lightning.pytorch").propagate = True
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        assert equal_bits(run(32.0), plain)
    assert "model.gradient_predivide=32.0: one data-parallel rank, so no sum to divide before." in caplog.messages
