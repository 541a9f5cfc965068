"""Lightning's first kind of FSDP needs CUDA; here only how it is set up. tests/gpu trains with it."""

from __future__ import annotations

import pytest
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from torch import nn

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.model.gpt import Block
from lit_stable.strategies import fsdp1
from lit_stable.strategies.fsdp1 import FSDP1Strategy, one_device_problem


def test_the_name_fsdp_means_one_unit_for_each_block_and_sharded_checkpoints():
    fsdp1.register_strategies()
    strategy = StrategyRegistry.get("fsdp")
    assert type(strategy) is FSDP1Strategy
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.kwargs["auto_wrap_policy"]._module_classes == {Block}
    assert strategy._state_dict_type == "sharded"


def test_ones_own_options_win():
    strategy = FSDP1Strategy(state_dict_type="full", auto_wrap_policy={nn.Linear}, cpu_offload=True)
    assert strategy._state_dict_type == "full"
    assert strategy.kwargs["auto_wrap_policy"]._module_classes == {nn.Linear}
    assert strategy.cpu_offload.offload_params


def test_the_other_names_of_lightning_stay_as_they_are():
    assert type(StrategyRegistry.get("fsdp_cpu_offload")) is FSDPStrategy


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_gradients_in_16_bits_need_more_than_one_device(precision):
    assert f"trainer.precision={precision}: strategy fsdp on one device" in one_device_problem(precision, 1)
    assert one_device_problem(precision, 2) is None


def test_that_is_told_before_anything_is_wrapped(monkeypatch):
    monkeypatch.setattr(FSDPStrategy, "setup_environment", lambda self: None)  # which wants CUDA
    monkeypatch.setattr(FSDP1Strategy, "world_size", 1)
    with pytest.raises(MisconfigurationException, match="precision=bf16-mixed: strategy fsdp on one device"):
        FSDP1Strategy(precision_plugin=FSDPPrecision("bf16-mixed")).setup_environment()
    FSDP1Strategy(precision_plugin=FSDPPrecision("32-true")).setup_environment()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_gradients_stored_as_the_weights_are_train_on_one(precision):
    assert one_device_problem(precision, 1) is None
