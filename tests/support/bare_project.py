"""A project without us, on one CPU process: whole, or sharded by Lightning's own strategy. Must not import lit_stable.

As a script it goes on from checkpoints in a process that cannot import lit_stable, and prints what it came to as JSON.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

STEPS = 6


class BareProject(LightningModule):
    """Learns on numbers that follow from the step, with a schedule."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sharded = sharded
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    def configure_model(self) -> None:
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            assert self.device_mesh is not None
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(self.trainer.global_step))
        error: Tensor = self.net(rows) - rows.roll(1, dims=1)
        return error.square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(sharded: bool, steps: int, callbacks: list[Any], resume: Any = None) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ModelParallelStrategy() if sharded else "auto",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    data = DataLoader(torch.zeros(100, 2, 4), batch_size=None)  # type: ignore[arg-type]
    # Lightning 2.6 asks, and loads without restriction where nothing is said.
    restricted = {"weights_only": True} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    trainer.fit(BareProject(sharded), data, ckpt_path=resume, **restricted)
    return trainer


def weights(trainer: Trainer) -> list[list[float]]:
    assert trainer.lightning_module is not None
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.lightning_module.parameters()]
    return [p.detach().flatten().tolist() for p in whole]


if __name__ == "__main__":
    sys.modules["lit_stable"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    results, *paths = sys.argv[1:]
    came_to = []
    for sharded, path in zip((False, True), paths, strict=True):
        trainer = train(sharded, STEPS, [], resume=path)
        came_to.append({"steps": trainer.global_step, "weights": weights(trainer)})
    with open(results, "w") as file:
        json.dump(came_to, file)
