"""Who skips a step when all others have judged it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_stable.callbacks.device_step import hook_steps, skip_step


class PassesOverStep3(Callback):
    """Skips a step behind all others, as a rung of the recovery ladder does."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        hook_steps(trainer, trainer.optimizers[0])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        skip_step(trainer, optimizer, torch.tensor(trainer.global_step == 2))
