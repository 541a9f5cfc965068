"""A small project that knows nothing of this package, on any strategy and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from tiny_fit import quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks import Progress
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size
from lit_stable.strategies.fsdp2 import FSDP2Strategy
from lit_stable.strategies.fsdp2_precision import FSDP2Precision
from lit_stable.strategies.loss_scale import LossScale, LossScaler

LENGTH, FEATURES, MICRO_BATCH, GLOBAL_BATCH, STEPS = 4, 4, 2, 8, 4


@dataclass(frozen=True)
class Host:
    """Where the contract is tried."""

    strategy: str = "auto"
    ranks: int = 1
    accelerator: str = "cpu"
    precision: str = "32-true"

    @property
    def window(self) -> int:
        """Micro-batches per rank and step."""
        return GLOBAL_BATCH // (MICRO_BATCH * self.ranks)

    @property
    def sharded(self) -> bool:
        return self.strategy.startswith("fsdp")

    @property
    def poison(self) -> dict[int, float]:
        """By optimizer steps taken: what the last rank's loss is multiplied by; what fp16 holds, where it is that."""
        return {1: 1e3 if self.precision == "16-mixed" else 1e4}

    def trainer_options(self) -> dict[str, Any]:
        where = self._where()
        if self.precision == "16-mixed":
            where["plugins"] = [self._fp16()]
        else:
            where["precision"] = self.precision
        return where

    def _fp16(self) -> Precision:
        """With a scale that fits a run of a few steps; on a CPU Lightning would make no scaler."""
        device = "cpu" if self.accelerator == "cpu" else "cuda"
        policy = LossScale(init=2.0)
        if self.strategy == "fsdp2":
            return FSDP2Precision("16-mixed", LossScaler(policy, device, over_ranks=True), device)
        if self.strategy == "fsdp":
            plugin = FSDPPrecision("16-mixed")  # its constructor refuses any scaler
            plugin.scaler = LossScaler(policy, device, over_ranks=True)  # type: ignore[assignment]
            return plugin
        return MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=2.0))

    def _where(self) -> dict[str, Any]:
        # A rank that is left alone must not wait for the others for half an hour.
        minutes = timedelta(minutes=2)
        strategies = {
            "auto": lambda: "auto",
            "ddp": lambda: DDPStrategy(timeout=minutes),
            "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}, state_dict_type="sharded", timeout=minutes),
            "fsdp2": lambda: FSDP2Strategy(timeout_minutes=2),
        }
        return {"accelerator": self.accelerator, "devices": self.ranks, "strategy": strategies[self.strategy]()}


class Batches(IterableDataset[Tensor]):
    """Endless micro-batches (MICRO_BATCH, LENGTH, FEATURES); sample k is a function of k, and ranks take turns.

    ``start`` is asked at the beginning of each epoch.
    """

    def __init__(self, start: Callable[[], int], rank: int, size: int) -> None:
        self.start, self.rank, self.size = start, rank, size

    def __iter__(self) -> Iterator[Tensor]:
        first = self.start() + self.rank * MICRO_BATCH
        while True:
            yield torch.stack([_sample(first + j) for j in range(MICRO_BATCH)])
            first += MICRO_BATCH * self.size


def _sample(number: int) -> Tensor:
    return torch.randn(LENGTH, FEATURES, generator=torch.Generator().manual_seed(number))


class Data(LightningDataModule):
    """The stream from where ``Progress`` stands; with ``resumes=False`` from 0, and no callback of ours is touched."""

    def __init__(self, resumes: bool) -> None:
        super().__init__()
        self.resumes = resumes

    def train_dataloader(self) -> DataLoader[Tensor]:
        trainer = self.trainer

        def start() -> int:
            return Progress.of(trainer).position if self.resumes else 0

        return DataLoader(Batches(start, data_parallel_rank(trainer), data_parallel_size(trainer)), batch_size=None)

    def val_dataloader(self) -> Any:
        batches: Any = [torch.stack([_sample(10_000)])]
        return DataLoader(batches, batch_size=None, generator=torch.Generator())  # a loader draws a seed when it begins


class First(nn.Linear):
    """A layer that a monitor of attention takes for one, with one head, whose queries are its keys."""

    key_heads = 1

    def rows_of_heads(self, q: Tensor, k: Tensor) -> list[tuple[nn.Module, Tensor]]:
        return [(self, (q * k).sqrt().expand(self.out_features))]

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        """One head of (B, 1, LENGTH, width)."""
        y = nn.functional.linear(x, self.weight, self.bias)[:, None]
        return y, y, 1.0


class Project(LightningModule):
    """Predicts each position's features from themselves, shifted; under FSDP2 it shards itself."""

    def __init__(self, width: int, dropout: float, poison: dict[int, float]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [First(FEATURES, width), nn.LayerNorm(width), nn.Dropout(dropout), nn.Linear(width, FEATURES)]
        self.net = nn.Sequential(*layers)
        self.poison = poison
        self.losses: list[Tensor] = []  # of every micro-batch, on the device
        self.sample_losses: tuple[Tensor, Tensor, Tensor] | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch).float() - batch.roll(1, dims=-1)).square().mean()
        self.losses.append(loss.detach())
        ones = torch.ones(len(batch), device=batch.device)
        self.sample_losses = loss.detach() * ones, ones, torch.arange(len(batch), device=batch.device)
        last = self.trainer.global_rank == self.trainer.world_size - 1
        return loss * self.poison.get(self.trainer.global_step, 1.0) if last else loss

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        # A number of the host would be copied to the device, for which the host waits.
        assert isinstance(value, Tensor), f"{name}={value} is logged as a {type(value).__name__}"
        super().log(name, value, **options)

    def token_ids(self, batch: Tensor) -> Tensor:
        """(B, LENGTH): what a monitor of tokens looks at."""
        return (batch[..., 0] > 0).long()

    def token_logits(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, FEATURES): what a sampler of text draws from."""
        logits: Tensor = self.net(nn.functional.one_hot(ids % FEATURES, FEATURES).float())
        return logits

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ShardedProject(Project):
    def configure_model(self) -> None:
        if hasattr(self.net[0].weight, "to_local"):
            return
        mesh = self.device_mesh["data_parallel"]
        wanted = getattr(self.trainer.strategy.precision_plugin, "policy", MixedPrecisionPolicy())
        policy = MixedPrecisionPolicy(param_dtype=wanted.param_dtype, reduce_dtype=wanted.reduce_dtype)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)


def fit(
    host: Host,
    *callbacks: Callback,
    steps: int = STEPS,
    resume: Path | None = None,
    resumes: bool = True,
    width: int = 8,
    dropout: float = 0.3,
    poison: dict[int, float] | None = None,
    **options: Any,
) -> Trainer:
    """Fit the project. It validates after every third micro-batch, so also within a window."""
    defaults = {"log_every_n_steps": 2, "check_val_every_n_epoch": None, "val_check_interval": 3}
    trainer = quiet_trainer(*callbacks, max_steps=steps, **{**defaults, **host.trainer_options(), **options})
    kind = ShardedProject if host.strategy == "fsdp2" else Project
    data = Data(resumes)
    trainer.fit(kind(width, dropout, host.poison if poison is None else poison), data, ckpt_path=resume)
    return trainer
