"""Lightning's own FSDP strategy and windows of several micro-batches."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from tiny_fit import TinyData, TinyModule, quiet_trainer, train_more
from torch import nn

from lit_stable.callbacks import AccumulationWindows, accumulation
from lit_stable.callbacks.whole_gradients import warn_of_whole_gradients


class FullyShardedDataParallel(nn.Module):
    """As far as it is asked: a wrapper by name, with its precision."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.mixed_precision = SimpleNamespace(param_dtype=dtype)


class Reduces(FSDPStrategy):
    def block_backward_sync(self) -> Any:
        return nullcontext()


def trainer_of(strategy: type[FSDPStrategy], model: nn.Module) -> Any:
    made = object.__new__(strategy)  # a real one wants a CUDA device
    made._model = model
    return SimpleNamespace(strategy=made)


@pytest.mark.parametrize(
    ("dtype", "what"),
    [
        (
            torch.bfloat16,
            r" of bfloat16 on every rank, which take the memory of whole weights and are rounded each time; take",
        ),
        (torch.float32, r" on every rank, which take the memory of whole weights; take"),
        (None, r" on every rank, which take the memory of whole weights; take"),
    ],
)
def test_a_window_of_whole_gradients_is_warned_of(dtype: torch.dtype | None, what: str) -> None:
    with pytest.warns(UserWarning, match=rf"FSDPStrategy: adds up .* whole gradients{what}"):
        warn_of_whole_gradients(trainer_of(FSDPStrategy, FullyShardedDataParallel(dtype)))


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        (Reduces, FullyShardedDataParallel(torch.bfloat16)),
        (FSDPStrategy, nn.Linear(1, 1)),
    ],
)
def test_what_reduces_each_micro_batch_is_not(strategy: Any, model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_whole_gradients(trainer_of(strategy, model))


@pytest.mark.parametrize(("global_batch", "times"), [(2, 0), (4, 1)])
def test_windows_of_several_micro_batches_look_once_a_fit(
    global_batch: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(accumulation, "warn_of_whole_gradients", asked.append)
    trainer = quiet_trainer(AccumulationWindows(global_batch, micro_batch=2), max_steps=2)
    trainer.fit(module := TinyModule(), TinyData())
    assert len(asked) == times
    train_more(trainer, 2)
    trainer.fit(module, TinyData())
    assert len(asked) == 2 * times
