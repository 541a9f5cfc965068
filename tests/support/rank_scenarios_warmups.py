"""Batch-size and sequence-length warm-up on two ranks; run as ``rank_scenarios.py`` is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from rank_scenarios import fit2, main, rank, scenario, shared_folder
from tiny_fit import TinyModule, Watch, quiet_trainer, sample
from tiny_gpt_run import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    NumberedData,
    NumberedSamples,
    SaveEveryMicroBatch,
    equal_bits,
)
from torch.utils.data import DataLoader

from lit_stable.callbacks import AccumulationWindows, BatchSizeWarmup, Progress, SequenceLengthWarmup


def ramp() -> BatchSizeWarmup:
    """4, 4, 8, 8, ... samples per step."""
    return BatchSizeWarmup("4 for 2 steps", global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, lr_factor="sqrt")


def lengths() -> SequenceLengthWarmup:
    """4, 8, 8, 12, 16 tokens per sample."""
    return SequenceLengthWarmup(min_length=4, total_steps=5, max_length=LENGTH, multiple_of=4)


@scenario
def ramp_on_two_ranks() -> dict[str, Any]:
    """Saved after every micro-batch; the checkpoints load on one rank too."""
    folder = shared_folder()
    run = fit2("ddp", steps=5, windows=ramp(), callbacks=(SaveEveryMicroBatch(folder),))
    return {"rows": run.rows, "folder": str(folder), "mark": list(Progress.of(run.trainer).mark)}


@scenario
def lengths_on_two_ranks() -> dict[str, Any]:
    run = fit2("fsdp2", steps=6, callbacks=(lengths(),))
    return {"rows": run.rows, "mark": list(Progress.of(run.trainer).mark)}


class MaskedSamples(NumberedSamples):
    """A sample's first token says how many of its labels count: from none on."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            counted = (batch["input_ids"][:, :1] * 5) % (LENGTH + 1)
            masked = torch.arange(LENGTH) >= counted
            yield {**batch, "labels": batch["labels"].masked_fill(masked, -100)}


class MaskedData(NumberedData):
    samples = MaskedSamples


def by_tokens() -> AccumulationWindows:
    return AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH, average_over="tokens")


class OpenWindow(Callback):
    """Which share of the gradients this rank holds while a window is open."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if Progress.of(trainer).pending_samples:
            gradients = [p.grad for p in pl_module.parameters() if p.requires_grad]
            own = sum(g.to_local().numel() if hasattr(g, "to_local") else g.numel() for g in gradients)
            self.shares.append(own / sum(g.numel() for g in gradients))


def _averaged_over_tokens(strategy: str) -> dict[str, Any]:
    folder = shared_folder()
    save = SaveEveryMicroBatch(folder, only=(3,))
    held = OpenWindow()
    run = fit2(strategy, steps=3, windows=by_tokens(), data=MaskedData(), callbacks=(save, held), validates=False)
    path = folder / "m3.ckpt"
    again = fit2(strategy, steps=3, windows=by_tokens(), data=MaskedData(), ckpt_path=path, validates=False)
    return {"rows": run.rows, "same_bits": equal_bits(again.weights, run.weights), "held": held.shares}


@scenario
def averaged_over_tokens_ddp() -> dict[str, Any]:
    return _averaged_over_tokens("ddp")


@scenario
def averaged_over_tokens_fsdp2() -> dict[str, Any]:
    return _averaged_over_tokens("fsdp2")


def from_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def batches(number: int) -> DataLoader[torch.Tensor]:
    return DataLoader([torch.stack([sample(100 * rank() + i)]) for i in range(number)], batch_size=None)  # type: ignore[arg-type]


@scenario
def loaders_of_unequal_length() -> dict[str, Any]:
    """Five batches on one rank and seven on the other, twice, in windows of two micro-batches."""
    validated: list[int] = []
    watch = Watch("on_validation_start", lambda trainer: validated.append(trainer.global_step))
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "max_steps": -1}
    trainer = quiet_trainer(AccumulationWindows(4, 1), watch, max_epochs=2, **options)
    module = TinyModule()
    trainer.fit(module, batches(5 + 2 * rank()), batches(1))
    marks = from_all([Progress.of(trainer).mark, module.net[0].weight.flatten().tolist()])
    return {"ranks": marks, "validated": from_all(validated)}


if __name__ == "__main__":
    main()
