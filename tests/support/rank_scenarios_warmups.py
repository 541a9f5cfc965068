"""Batch-size and sequence-length warm-up on two ranks; run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from rank_scenarios import fit2, main, rank, scenario, shared_folder
from tiny_fit import WIDTH, TinyModule, Watch, quiet_trainer, sample
from tiny_gpt_run import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    NumberedData,
    NumberedSamples,
    SaveEveryMicroBatch,
    equal_bits,
)
from torch.utils.data import DataLoader, IterableDataset

from lit_stable.callbacks import (
    AccumulationWindows,
    BatchSizeWarmup,
    Progress,
    ResumingBatches,
    SequenceLengthWarmup,
    ValidateEverySteps,
)

TWO: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "max_steps": -1}


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
    trainer = quiet_trainer(AccumulationWindows(4, 1), watch, max_epochs=2, **TWO)
    module = TinyModule()
    trainer.fit(module, batches(5 + 2 * rank()), batches(1))
    marks = from_all([Progress.of(trainer).mark, module.net[0].weight.flatten().tolist()])
    return {"ranks": marks, "validated": from_all(validated)}


class NoLength(IterableDataset[torch.Tensor]):
    """So many batches of so many rows, of which nobody knows the number."""

    def __init__(self, batches: int, rows: int = 1) -> None:
        self.batches, self.rows = batches, rows

    def __iter__(self) -> Any:
        first = 100 * rank()
        for _ in range(self.batches):
            yield torch.stack([sample(first + i) for i in range(self.rows)])
            first += self.rows


def without_length(batches: int, rows: int = 1) -> DataLoader[torch.Tensor]:
    return DataLoader(NoLength(batches, rows), batch_size=None)


@scenario
def loaders_that_run_dry() -> dict[str, Any]:
    """As above, of loaders without a length."""
    module, validated = TinyModule(), []
    watch = Watch("on_validation_start", lambda trainer: validated.append(trainer.global_step))
    trainer = quiet_trainer(AccumulationWindows(4, 1), watch, max_epochs=2, **TWO)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, without_length(5 + 2 * rank()), batches(1))
    told = [str(line.message) for line in said if "run dry before others" in str(line.message)]
    marks = from_all([Progress.of(trainer).mark, module.net[0].weight.flatten().tolist()])
    return {"ranks": marks, "validated": from_all(validated), "told": from_all(len(told))}


@scenario
def batches_of_unequal_size() -> dict[str, Any]:
    """One row on one rank and three on the other, in windows of two micro-batches; validated by tokens."""
    module, seen = TinyModule(), []
    watch = Watch("on_train_batch_end", lambda trainer, *rest: seen.append(Progress.of(trainer).mark))
    every = ValidateEverySteps("40 tokens")
    options = {**TWO, "max_steps": 4, "max_epochs": -1, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2}
    quiet_trainer(every, watch, **options).fit(module, without_length(9, rows=1 + 2 * rank()), batches(1))
    return {"marks": from_all(seen), "validated": from_all(module.validated_after)}


@scenario
def batches_of_a_sampler_of_our_own() -> dict[str, Any]:
    """Two epochs of six items; and what Lightning says where it is to put a sampler of its own into ours."""
    read: list[int] = []
    items = [[torch.full((WIDTH,), float(i))] for i in range(6)]

    def fit(**options: Any) -> None:
        watch = Watch("on_train_batch_start", lambda trainer, batch, *rest: read.append(int(batch[0, 0])))
        trainer = quiet_trainer(Progress(), watch, **{**TWO, "max_steps": 6, "max_epochs": -1, **options})
        sampler = ResumingBatches(trainer, len(items), 1, seed=1)
        trainer.fit(TinyModule(), DataLoader(items, batch_sampler=sampler, collate_fn=lambda some: some[0][0][None]))  # type: ignore[arg-type]

    fit()
    with pytest.raises(TypeError) as error:
        fit(use_distributed_sampler=True)
    return {"read": from_all(read), "refusal": from_all(str(error.value))}


class ReadOnce(NoLength):
    """Two batches; on the second rank none ever after."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        self.batches *= 1 - rank()


@scenario
def what_one_rank_alone_would_refuse() -> dict[str, Any]:
    """A validation interval above the shorter loader's length, and a loader without data on one rank: from the start,
    and from the second epoch on."""
    messages, kinds = [], []
    read_once = DataLoader(ReadOnce(2), batch_size=None)
    for loader, interval in ((batches(3 + 2 * rank()), 4), (without_length(2 * rank()), 1.0), (read_once, 1.0)):
        trainer = quiet_trainer(AccumulationWindows(4, 1), max_epochs=3, val_check_interval=interval, **TWO)
        with pytest.raises(MisconfigurationException) as error:
            trainer.fit(TinyModule(), loader, batches(1))
        messages.append(str(error.value))
        kinds.append(type(trainer.val_check_interval).__name__)  # undone
    return {"messages": from_all(messages), "interval": from_all(kinds)}


if __name__ == "__main__":
    main()
