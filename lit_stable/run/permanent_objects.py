"""What lives as long as a run is not walked by Python's garbage collector again and again."""

from __future__ import annotations

import gc
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class PermanentObjects(Callback):
    """After a first micro-batch put all that lives where Python's garbage collector does not look, until the fit ends.

    Model, optimizer, compiled code and imported modules are half a million objects and more. A collection of the oldest
    generation walks them all, while the device runs out of work: several tenths of a second every few hundred steps.
    By then all that is compiled for the network is there. On CUDA garbage is collected first, since it may hold memory
    of the device, and what is put away (``gc.freeze``) is not looked at any more.
    """

    def __init__(self) -> None:
        self._put_away = False

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self._put_away:
            return
        if trainer.strategy.root_device.type == "cuda":
            gc.collect()
        gc.freeze()
        self._put_away = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._bring_back()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._bring_back()

    def _bring_back(self) -> None:
        if self._put_away:
            gc.unfreeze()
        self._put_away = False
