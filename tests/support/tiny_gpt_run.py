"""A GPT small enough to fit in a second, and fits of it that say everything about themselves."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks import (
    AccumulationWindows,
    GradClip,
    GradNorm,
    Progress,
    SafeCheckpoints,
    StepSeed,
    ValidateEverySteps,
)
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size
from lit_stable.model.config import GPTConfig
from lit_stable.module import GPTModule
from lit_stable.optim.schedule import LRSchedule
from lit_stable.strategies import fsdp1, fsdp2
from lit_stable.strategies.launcher import launched_devices
from lit_stable.strategies.loss_scale import DEFAULT, LossScale
from lit_stable.strategies.mesh import ONE_COPY, MeshOptions
from lit_stable.strategies.selection import select

VOCAB, LENGTH, MICRO_BATCH, GLOBAL_BATCH = 64, 16, 2, 8

fsdp1.register_strategies()
fsdp2.register_strategies()
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class NumberedSamples(IterableDataset):
    """Sample k is a function of k; the stream starts where Progress stands, in micro-batches rank after rank."""

    def __init__(self, start: int, rank: int, size: int, length: int = LENGTH) -> None:
        self.start, self.rank, self.size, self.length = start, rank, size, length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        position = self.start + self.rank * MICRO_BATCH
        while True:
            tokens = torch.stack([sample(position + j, self.length) for j in range(MICRO_BATCH)])
            position += MICRO_BATCH * self.size
            source = torch.zeros(MICRO_BATCH, dtype=torch.long)
            yield {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "source": source}


def sample(number: int, length: int = LENGTH) -> torch.Tensor:
    """(length + 1,) tokens with something to learn: a walk with a step that the sample fixes."""
    generator = torch.Generator().manual_seed(number)
    start, step = torch.randint(0, VOCAB, (2,), generator=generator).tolist()
    return (start + (1 + step % 3) * torch.arange(length + 1)) % VOCAB


class NumberedData(LightningDataModule):
    samples = NumberedSamples

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__()
        self.length = length

    def _stream(self, start: int) -> NumberedSamples:
        rank, size = data_parallel_rank(self.trainer), data_parallel_size(self.trainer)
        return self.samples(start, rank, size, self.length)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self._stream(Progress.of(self.trainer).position), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        batches = 4 // data_parallel_size(self.trainer)
        return DataLoader(list(itertools.islice(self._stream(10_000), batches)), batch_size=None)


class Recorder(Callback):
    """(step, loss, lr, gradient norm) of every optimizer step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        steps = Progress.of(trainer).steps
        if steps and (not self.rows or self.rows[-1][0] != steps) and not Progress.of(trainer).pending_samples:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            self.rows.append((steps, float(pl_module.window_loss), lr, float(GradNorm.of(trainer).value)))


class SaveEveryMicroBatch(Callback):
    """Checkpoints ``m0`` (before the first step), ``m1``, ... after each micro-batch, or ``only`` some of those."""

    def __init__(self, folder: Path, only: Sequence[int] | None = None) -> None:
        self.folder, self.only, self.count = folder, only, 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._save(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.count += 1
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self.only is None or self.count in self.only:
            trainer.save_checkpoint(self.folder / f"m{self.count}.ckpt")


@dataclass
class Fit:
    trainer: Trainer
    module: GPTModule
    rows: list[tuple[int, float, float, float]]
    weights: dict[str, torch.Tensor]


def tiny_module(compile: str = "off", recompute: Any = False, z_loss: float = 0.0, **config: Any) -> GPTModule:
    options = {"vocab_size": VOCAB, "n_layer": 2, "n_head": 2, "d_model": 32, "max_length": LENGTH, **config}
    schedule = LRSchedule(peak=1e-2, warmup=16, horizon=80, unit="samples")
    return GPTModule(GPTConfig(**options), schedule, compile=compile, recompute=recompute, z_loss=z_loss)


def fit(
    strategy: str = "auto",
    devices: int = 1,
    steps: int = 6,
    *,
    accelerator: str = "cpu",
    precision: str = "32-true",
    ckpt_path: Path | str | None = None,
    callbacks: tuple[Callback, ...] = (),
    module: GPTModule | None = None,
    max_norm: float | None = 0.5,
    clip: GradClip | None = None,
    mesh: MeshOptions = ONE_COPY,
    loss_scale: LossScale = DEFAULT,
    nan: Callback | None = None,
    windows: AccumulationWindows | None = None,
    validates: bool = True,
    data: NumberedData | None = None,
    in_background: bool = False,
    **config: Any,
) -> Fit:
    """Fit the tiny GPT with the spine's callbacks, ``nan`` before them; ``config`` goes to the GPT.

    ``clip`` stands in for the clipping to ``max_norm``; without either nothing is clipped.
    """
    recorder = Recorder()
    validation = [ValidateEverySteps(2)] if validates else []
    windows = windows or AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH)
    if max_norm is not None:
        clip = clip or GradClip(max_norm)
    own = [GradNorm(), windows, StepSeed(3), SafeCheckpoints(in_background), *([clip] if clip else [])]
    options: dict[str, Any] = dict(
        accelerator=accelerator,
        **_devices(devices),
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        callbacks=[*([nan] if nan else []), *own, *validation, recorder, *callbacks],
        check_val_every_n_epoch=None,
        **({} if validates else {"limit_val_batches": 0}),
    )
    trainer = Trainer(**select(options, mesh, loss_scale))
    module = module or tiny_module(**config)
    trainer.fit(module, datamodule=data or NumberedData(), ckpt_path=ckpt_path)
    return Fit(trainer, module, recorder.rows, whole_weights(module))


def _devices(ranks: int) -> dict[str, int]:
    """Options of a Trainer for so many ranks, which a launch may have dealt out over several hosts."""
    launched = launched_devices()
    if launched is None or launched["num_nodes"] == 1:
        return {"devices": ranks}
    assert launched["devices"] * launched["num_nodes"] == ranks, launched
    return launched


def whole_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter gathered and on the CPU."""
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.named_parameters()}
    return {name: parameter.detach().cpu().clone() for name, parameter in whole.items()}


def equal_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    # A rank may have nothing of a parameter that FSDP1 has cut up.
    return max((a[name] - b[name]).abs().max().item() for name in a if a[name].numel())
