"""A tiny project that knows nothing of this package, an endless stream that resumes, and a quiet trainer."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks import Progress

WIDTH = 4


def sample(index: int) -> Tensor:
    """Sample ``index`` of the stream, (WIDTH,): a function of its index alone."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Stream(IterableDataset[Tensor]):
    """Endless batches (B, WIDTH) of consecutive samples from ``start`` on."""

    def __init__(self, start: int, batch_size: int) -> None:
        self.start, self.batch_size = start, batch_size

    def __iter__(self) -> Iterator[Tensor]:
        first = self.start
        while True:
            yield torch.stack([sample(first + i) for i in range(self.batch_size)])
            first += self.batch_size


class TinyData(LightningDataModule):
    """The stream from where ``Progress`` stands; with ``resumes=False`` from 0, and no callback of ours is touched."""

    def __init__(self, batch_size: int = 2, resumes: bool = True, validation_batches: int = 0) -> None:
        super().__init__()
        self.batch_size, self.resumes, self.validation_batches = batch_size, resumes, validation_batches

    def train_dataloader(self) -> DataLoader[Tensor]:
        start = Progress.of(self.trainer).position if self.resumes else 0
        return DataLoader(Stream(start, self.batch_size), batch_size=None)

    def val_dataloader(self) -> Any:
        batches = [torch.stack([sample(10_000 + i)]) for i in range(self.validation_batches)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class TinyModule(LightningModule):
    """Predicts a shifted sample; at the optimizer steps in ``poison`` its loss is multiplied by that number."""

    def __init__(
        self,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        dropout: float = 0.0,
        poison: dict[int, float] | None = None,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, WIDTH)]
        self.net = nn.Sequential(*layers)
        self.make_optimizer = make_optimizer or adamw()
        self.poison = poison or {}
        self.validated_after: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss: Tensor = (self.net(batch) - batch.roll(1, dims=1)).square().mean()
        return loss * self.poison.get(self.trainer.global_step, 1.0)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated_after.append(self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def adamw(**options: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """AdamW with a decay strong enough that a step with zero gradients would be seen; fused unless told otherwise."""
    return lambda parameters: torch.optim.AdamW(
        parameters, **{"lr": 0.05, "weight_decay": 0.1, "fused": True, **options}
    )


def quiet_trainer(*callbacks: Callback, max_steps: int = 4, **options: Any) -> Trainer:
    """A trainer on one CPU process that prints and writes nothing."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": max_steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def train_more(trainer: Trainer, steps: int) -> None:
    """Let the next fit of a finished trainer go on for so many optimizer steps."""
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + steps


def snapshot(trainer: Trainer) -> dict[str, Any]:
    """A copy of the weights and the first optimizer's state."""
    assert trainer.lightning_module is not None
    weights = trainer.lightning_module.state_dict()
    return copy.deepcopy({"weights": weights, "optimizer": trainer.optimizers[0].state_dict()["state"]})


def assert_same_bits(left: Any, right: Any, where: str = "") -> None:
    """Equal in structure, dtype and every bit; NaN equals NaN."""
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left.nan_to_num(7e7), right.nan_to_num(7e7)), f"{where}: {left} and {right}"
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same_bits(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same_bits(a, b, f"{where}[{index}]")
    else:
        assert left == right, f"{where}: {left} and {right}"


class Watch(Callback):
    """Calls a function at one hook of Lightning, with the trainer and whatever else the hook gets."""

    def __init__(self, hook: str, function: Callable[..., None]) -> None:
        setattr(self, hook, lambda trainer, module, *rest, **named: function(trainer, *rest))


class SaveAtSteps(Callback):
    """Saves before the first step (``start.ckpt``) and after every micro-batch (``micro-N.ckpt``)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "start.ckpt")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        self.seen += 1
        trainer.save_checkpoint(self.folder / f"micro-{self.seen}.ckpt")


class Turns(TinyModule):
    """Two optimizers that step in turns; ``first`` is the place of the one that begins."""

    automatic_optimization = False
    first = 0

    def configure_optimizers(self) -> Any:
        first, *rest = self.net
        return [torch.optim.AdamW(m.parameters()) for m in (first, nn.ModuleList(rest))]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer = self.optimizers()[(self.first + batch_idx) % 2]
        optimizer.step()
        optimizer.zero_grad()
