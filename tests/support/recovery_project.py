"""A project with poisoned samples that writes down which samples each optimizer step has read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from tiny_fit import quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from lit_stable.callbacks import Detectors, Progress, Recovery, SafeCheckpoints, StepSeed
from lit_stable.callbacks.recovery_ledger import FILE, Entry, read_ledger
from lit_stable.callbacks.resuming_batches import ResumingBatches
from lit_stable.callbacks.spike_alarm import SpikeAlarm

SIZE, WIDTH, BATCH = 1000, 4, 2  # items, features, samples per rank and step
_BASE = 32  # of the digits in which an item says its number
RUNGS: list[dict[str, Any]] = [
    {"do": "wait", "steps": 5},
    {"do": "rewind", "before": 1, "after": 2, "max_times": 4, "steps": 5},
    {"do": "stop"},
]


class Rows(Dataset):
    """Item i is (2 + WIDTH,): i in two digits that bf16 holds, and numbers that follow from it."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> Tensor:
        digits = torch.tensor([float(d) for d in divmod(i, _BASE)])
        return torch.cat([digits, torch.randn(WIDTH, generator=torch.Generator().manual_seed(i))])


def numbers_of(batch: Tensor) -> Tensor:
    """(B,): the numbers of a batch's items, fp32."""
    return batch[:, 0].float() * _BASE + batch[:, 1].float()


class Data(LightningDataModule):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.seed = seed

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), batch_sampler=ResumingBatches(self.trainer, SIZE, BATCH, self.seed))


class Module(LightningModule):
    """Its loss is NaN where a batch holds a poisoned item; ``ids`` holds what each step has read."""

    def __init__(self, poison: Iterable[int] = (), factor: float = math.nan) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, WIDTH))
        self.poison, self.factor = set(poison), factor
        self.ids: dict[int, list[int]] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        numbers = [int(n) for n in numbers_of(batch)]
        self.ids[Progress.of(self.trainer).steps + 1] = numbers
        x = batch[:, 2:]
        loss: Tensor = (self.net(x) - x.roll(1, dims=1)).square().mean()
        return loss * self.factor if self.poison & set(numbers) else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=True)


class SaveEvery(Callback):
    """Saves before the first step and every so many steps."""

    def __init__(self, folder: Path, every: int = 5) -> None:
        self.folder, self.every, self.seen = folder, every, -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = Progress.of(trainer).steps
        if self.seen == 0:
            trainer.save_checkpoint(self.folder / "step-0.ckpt")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        steps = Progress.of(trainer).steps
        if steps != self.seen and steps % self.every == 0:
            trainer.save_checkpoint(self.folder / f"step-{steps}.ckpt")
        self.seen = steps


def make_trainer(folder: Path, steps: int, *others: Callback, every: int = 5, **options: Any) -> Trainer:
    """With the ladder above unless ``recovery`` says otherwise."""
    recovery = options.pop("recovery", None) or Recovery(RUNGS, {"not_finite": "rewind", "spike": "wait"})
    detectors = Detectors(spike=SpikeAlarm(warmup=8, window=16), slow_divergence=None, plateau=None, low_loss=None)
    ours = [StepSeed(1), SafeCheckpoints(), detectors, recovery]
    saves = SaveEvery(folder, every)
    options = {"use_distributed_sampler": False, "default_root_dir": folder, "log_every_n_steps": 1, **options}
    return quiet_trainer(*others, *ours, saves, max_steps=steps, **options)


def items(seed: int) -> Callable[[int], int]:
    """Stream position -> item, worked out anew: epoch after epoch, each shuffled by (seed, epoch)."""
    from lit_stable.callbacks.seeds import mix

    def item(position: int) -> int:
        epoch, place = divmod(position, SIZE)
        generator = torch.Generator().manual_seed(mix(seed, epoch) >> 1)
        return int(torch.randperm(SIZE, generator=generator)[place])

    return item


def poison(*steps: int, seed: int = 1) -> set[int]:
    """Items that an undisturbed run on one process reads at those steps."""
    return {items(seed)(p) for step in steps for p in range((step - 1) * BATCH, step * BATCH)}


def ledger_lines(folder: Path, *actions: str) -> list[Entry]:
    """The lines of a folder's ledger, or those of some actions."""
    return [e for e in read_ledger(folder / FILE) if not actions or e.action in actions]


def ids_by_the_ledger(ledger: Path, seed: int, steps: int, batch: int = BATCH) -> list[list[int]]:
    """What each step of the finished run must have read: a function of the seed and the ledger alone."""
    lines = [line for line in map(_parsed, ledger.read_text().splitlines() if ledger.exists() else []) if line]
    lines = [line for line in lines if line["run"] == lines[-1]["run"]]  # killed before any save it begins anew
    done = [line["done"] for line in lines if line["done"].get("acted", True)]
    dropped = {p for one in done for start, stop in one.get("dropped", []) for p in range(start, stop)}
    positions = (p for p in range(10**9) if p not in dropped)
    item = items(seed)
    return [[item(next(positions)) for _ in range(batch)] for _ in range(steps)]


def _parsed(line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # cut short by a kill
        return {}


def clean_run(folder: Path, ids: list[list[int]], module: Module | None = None, **options: Any) -> Module:
    """The weights of a run whose steps are given those items, on this rank, and nothing else."""
    module = module or Module()

    class Given(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(Rows(), batch_sampler=ids)

    options = {"use_distributed_sampler": False, "default_root_dir": folder, **options}
    quiet_trainer(StepSeed(1), SafeCheckpoints(), max_steps=len(ids), **options).fit(module, Given())
    return module


class ShardedModule(Module):
    def configure_model(self) -> None:
        if not hasattr(self.net[0].weight, "to_local"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
