"""Any wait of the host for the device raises, in the steps that promise none."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer


def set_mode(mode: str) -> None:
    """``default`` or ``error``; nothing where there is no CUDA device, so that the tests' code can be tried there."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


class NoSync(Callback):
    """Steps ``first`` to ``last``, counted from 1, may not wait. Stands last in the list, behind what it watches."""

    def __init__(self, first: int = 3, last: int = 9) -> None:
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        set_mode("error" if self.first <= trainer.global_step + 1 <= self.last else "default")

    def on_exception(self, *rest: Any) -> None:
        set_mode("default")

    def teardown(self, *rest: Any, **named: Any) -> None:
        set_mode("default")
