"""A LightningModule that knows nothing of lit-stable, made stable by a list of callbacks.

python plain.py                                                  trains with them; a broken record is survived
python plain.py --bare --max_steps 12 --out runs/bare            trains without them
python plain.py --ckpt_path runs/bare/last.ckpt                  goes on with them where the bare run ended
"""

from __future__ import annotations

import argparse

import characters
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from lit_stable.callbacks import GracefulStop, GradClip, GradSpikeSkip, LROverride, SafeCheckpoints, StepSeed


class CharacterModel(LightningModule):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.network = characters.Network()

    def training_step(self, batch, batch_idx):
        loss = self.network.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.network.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, foreach=True)
        rise, fall = LinearLR(optimizer, 0.1, total_iters=10), CosineAnnealingLR(optimizer, 50)
        schedule = SequentialLR(optimizer, [rise, fall], milestones=[10])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CharacterData(LightningDataModule):
    def train_dataloader(self):
        return characters.training()

    def val_dataloader(self):
        return characters.validation()


def stability() -> list[Callback]:
    """All that is added to the project."""
    return [
        GradSpikeSkip(),  # a step whose gradient norm is a spike, or not finite, changes nothing
        GradClip(max_norm=1.0),
        LROverride(start=30, factor=0.5),  # half the schedule's rate from step 30 on
        StepSeed(seed=1),
        SafeCheckpoints(),
        GracefulStop(),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bare", action="store_true", help="without the callbacks")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--ckpt_path")
    parser.add_argument("--out", default="runs/plain")
    options = parser.parse_args()
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=options.max_steps,
        logger=CSVLogger(options.out, name="", version=""),
        log_every_n_steps=5,
        callbacks=[ModelCheckpoint(options.out, save_last=True), *([] if options.bare else stability())],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(CharacterModel(), CharacterData(), ckpt_path=options.ckpt_path)
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name:24} {value:.4g}")


if __name__ == "__main__":
    main()
