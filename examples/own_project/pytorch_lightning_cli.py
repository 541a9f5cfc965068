"""The same project written with ``import pytorch_lightning``: the callbacks, and the YAML, are the same.

python pytorch_lightning_cli.py fit --config cli.yaml
"""

from __future__ import annotations

import characters
import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI


class CharacterModel(pl.LightningModule):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.network = characters.Network()

    def training_step(self, batch, batch_idx):
        return self.network.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.network.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, foreach=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CharacterData(pl.LightningDataModule):
    def train_dataloader(self):
        return characters.training()

    def val_dataloader(self):
        return characters.validation()


if __name__ == "__main__":
    LightningCLI(CharacterModel, CharacterData, save_config_kwargs={"overwrite": True})
