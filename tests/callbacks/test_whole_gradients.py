"""Lightning's own FSDP strategy and windows of several micro-batches."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lit_stable.callbacks.whole_gradients import warn_of_whole_gradients


class FullyShardedDataParallel(nn.Module):
    """As far as it is asked: a wrapper by name, with its precision."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.mixed_precision = SimpleNamespace(param_dtype=dtype)


class Reduces(FSDPStrategy):
    def block_backward_sync(self) -> Any:
        return nullcontext()


def trainer(strategy: type[FSDPStrategy], model: nn.Module) -> Any:
    made = object.__new__(strategy)  # a real one wants a CUDA device
    made._model = model
    return SimpleNamespace(strategy=made)


def test_windows_in_16_bits_are_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"FSDPStrategy: adds up .* whole gradients of bfloat16 on every rank, .* take"
    ):
        warn_of_whole_gradients(trainer(FSDPStrategy, FullyShardedDataParallel(torch.bfloat16)))


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        (Reduces, FullyShardedDataParallel(torch.bfloat16)),
        (FSDPStrategy, FullyShardedDataParallel(torch.float32)),
        (FSDPStrategy, FullyShardedDataParallel(None)),
        (FSDPStrategy, nn.Linear(1, 1)),
    ],
)
def test_what_reduces_each_micro_batch_or_adds_up_in_fp32_is_not(strategy: Any, model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_whole_gradients(trainer(strategy, model))
