"""How much of the training data has no loss."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_stable.callbacks.base import is_logging_step
from lit_stable.callbacks.ignored_label import IGNORED
from lit_stable.callbacks.rank_mean import mean_over_ranks


class MaskedShare(Callback):
    """Log the share of labels that are masked.

    Counted on the device, over all micro-batches and ranks of the step that is logged; nothing waits for it between
    logging steps.

    Logged at logging steps: ``data/masked_share``, 0 to 1.
    """

    def __init__(self) -> None:
        self._masked: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._masked = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._masked.append((batch["labels"] == IGNORED).float().mean())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        masked, self._masked = self._masked, []
        if is_logging_step(trainer):
            pl_module.log("data/masked_share", mean_over_ranks(trainer, torch.stack(masked).mean()))
