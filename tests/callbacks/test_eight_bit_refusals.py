"""What 8-bit Adam refuses, in a sentence. Checkpoints in another form: test_eight_bit_resume.py."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import Mock

import bitsandbytes
import pytest
import torch
from eight_bit_models import eight_bit, fit_tiny
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from tiny_fit import TinyData, TinyModule, quiet_trainer
from torch import nn

from lit_stable.callbacks import EightBitAdam
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_adam import refuse_strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (
                {"min_8bit_size": size},
                rf"`EightBitAdam\(min_8bit_size={size!r}\)`: must be a whole number of elements, 1",
            )
            for size in (0, -4096, "4096", True, 4096.0)
        ),
        *(
            (
                {"keep_32_bit": names},
                rf"`EightBitAdam\(keep_32_bit={re.escape(repr(names))}\)`: must be a list of patterns",
            )
            for names in ("head", "", ["head", 1], {"head": 1}, 7)
        ),
        ({"bits": "8"}, r"`EightBitAdam\(bits='8'\)`: must be one of 8, 32\."),
        ({"bits": 4}, r"`EightBitAdam\(bits=4\)`: must be one of 8, 32\."),
        ({"state_map": "nf4"}, r"`EightBitAdam\(state_map='nf4'\)`: must be one of dynamic, linear\."),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        EightBitAdam(**options)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [(FSDPStrategy, "FSDP1 flattens parameters together"), (DeepSpeedStrategy, "DeepSpeed brings an optimizer of its")],
)
def test_strategies_that_leave_no_parameters_apart_are_refused_at_the_start(strategy: Any, message: str) -> None:
    trainer = quiet_trainer()
    trainer.strategy.__class__ = type("Mine", (strategy,), {})
    with pytest.raises(MisconfigurationException, match=message):
        refuse_strategy(trainer)


def test_a_model_that_wraps_itself_with_fsdp1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullyShardedDataParallel(nn.Linear):
        pass

    class Wrapped(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = FullyShardedDataParallel(2, 2)

    with pytest.raises(MisconfigurationException, match="FSDP1 flattens parameters together"):
        fit_tiny(eight_bit(), module=Wrapped())


def test_arguments_are_given_by_name_alone() -> None:
    """Those of bitsandbytes that are gone, by place, would be taken for others."""
    with pytest.raises(TypeError, match="1 positional argument"):
        EightBitAdam(8)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_wise'"):
        EightBitAdam(block_wise=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "SGD"),
        (bitsandbytes.optim.AdamW8bit, "AdamW8bit"),
        (bitsandbytes.optim.PagedAdamW8bit, "PagedAdamW8bit"),
        (lambda p: None, "no optimizer, so nothing would be trained"),
    ],
)
def test_optimizers_of_other_kinds_are_refused_by_name_and_none_is_called_none(kind: Any, said: str) -> None:
    with pytest.raises(
        MisconfigurationException, match=rf"^`TinyModule.configure_optimizers` returns {said}: `EightBitAdam` takes"
    ):
        fit_tiny(eight_bit(), module=TinyModule(kind))


def test_parameters_that_lie_elsewhere_than_the_run_are_refused_as_the_fit_begins() -> None:
    """As FSDP2's CPU offload places them in a run on GPUs."""
    elsewhere = nn.Parameter(torch.empty(8, 4, device="meta"))
    with pytest.raises(
        MisconfigurationException,
        match=r"a parameter of no module lies on meta while the run is on cpu; .* turn CPU offload off",
    ):
        fit_tiny(eight_bit(), module=TinyModule(lambda parameters: torch.optim.AdamW([*parameters, elsewhere])))


def test_a_pattern_that_selects_nothing_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="pattern 'head': matches no module"):
        fit_tiny(eight_bit(keep_32_bit=["head"]))


def test_a_validation_needs_nothing_of_it() -> None:
    trainer = quiet_trainer(callback := eight_bit())
    callback.setup(trainer, Mock(), "validate")
    assert "setup_optimizers" not in vars(trainer.strategy)


def test_what_it_put_on_the_strategy_is_gone_after_an_error() -> None:
    trainer = quiet_trainer(eight_bit())
    with pytest.raises(MisconfigurationException):
        trainer.fit(TinyModule(lambda p: torch.optim.SGD(p, 0.1)), TinyData())
    assert "setup_optimizers" not in vars(trainer.strategy)
    trainer.fit(TinyModule(), TinyData())
    assert trainer.global_step == 4
