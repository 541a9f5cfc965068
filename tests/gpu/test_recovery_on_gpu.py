"""Stepping back on one CUDA device: no step waits between what the ladder does, and a rewind is exact there too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from no_sync import NoSync
from recovery_project import (
    BATCH,
    Data,
    Module,
    ShardedModule,
    clean_run,
    ids_by_the_ledger,
    ledger_lines,
    make_trainer,
    numbers_of,
    poison,
)
from tiny_fit import Watch, assert_same_bits
from torch import Tensor

from lit_stable.callbacks import LRBackoff, Progress, Recovery, ScriptedSkip, emit, fit_with_recovery
from lit_stable.callbacks.event_ring import LAG
from lit_stable.callbacks.events import Event
from lit_stable.callbacks.recovery_ledger import FILE
from lit_stable.strategies.fsdp2 import FSDP2Strategy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Recovery", "ignore:step ", "ignore:LRBackoff")]

# So that the tests' own code can be tried where there is no such device.
HOST, LATE = ("gpu", LAG) if CUDAAccelerator.is_available() else ("cpu", 0)
STEPS = 36
BAD = poison(17)


class Poisoned(Module):
    """The same, judged on the device."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch[:, 2:]
        loss: Tensor = (self.net(x) - x.roll(1, dims=1)).square().mean()
        bad = torch.isin(numbers_of(batch), self.bad).any()
        return loss * torch.where(bad, self.nan, self.one)

    def on_fit_start(self) -> None:
        self.bad = torch.tensor([float(i) for i in self.poison] or [-1.0], device=self.device)
        self.nan, self.one = (torch.tensor(v, device=self.device) for v in (torch.nan, 1.0))


class PoisonedShards(Poisoned, ShardedModule):
    pass


def trouble(at: int) -> Watch:
    def tell(trainer: Any, *rest: Any) -> None:
        if Progress.of(trainer).steps == at:
            emit(trainer, Event(at, "drill", {}))

    return Watch("on_train_batch_end", tell)


def run(folder: Path, recovery: Recovery | None, *others: Any, strategy: Any = "auto", **options: Any) -> Any:
    options = {"log_every_n_steps": 100, "accelerator": HOST, "strategy": strategy, "every": 10, **options}
    trainer = make_trainer(folder, options.pop("steps", STEPS), *others, recovery=recovery, **options)
    trainer.callbacks.append(NoSync())
    module = (Poisoned if strategy == "auto" else PoisonedShards)(options.pop("bad", BAD))
    fit_with_recovery(trainer, module, Data())
    return trainer, module


@pytest.mark.parametrize("kind", ["auto", "fsdp2"])
def test_a_rewind_is_exact_and_no_step_before_it_waits(kind: str, tmp_path: Path) -> None:
    strategy = "auto" if kind == "auto" else FSDP2Strategy()
    rungs = [{"do": "rewind", "before": 1, "after": 2, "max_times": 2, "steps": 5}, {"do": "stop"}]
    _, module = run(tmp_path, Recovery(rungs, {"not_finite": "rewind"}), strategy=strategy)
    (rewind,) = ledger_lines(tmp_path, "rewind")
    window = [15 * BATCH, (17 + LATE + 2) * BATCH]
    assert (rewind.step, rewind.done["to"], rewind.done["dropped"]) == (17 + LATE, 10, [window])
    ids = ids_by_the_ledger(tmp_path / FILE, 1, STEPS)
    assert not BAD & {i for step in ids for i in step}
    clean = (Poisoned if kind == "auto" else PoisonedShards)()
    again = "auto" if kind == "auto" else FSDP2Strategy()
    clean_run(tmp_path / "clean", ids, clean, accelerator=HOST, strategy=again)
    assert_same_bits(module.state_dict(), clean.state_dict())


@pytest.mark.parametrize(
    "rung", [{"do": "skip", "skip_steps": 2}, {"do": "lr", "factor": 0.5}, {"do": "wait"}], ids=lambda r: r["do"]
)
def test_what_is_done_without_leaving_the_fit_waits_for_nothing(rung: dict[str, Any], tmp_path: Path) -> None:
    recovery = Recovery([{**rung, "steps": 5}, {"do": "stop"}], {"drill": rung["do"]})
    trainer, _ = run(tmp_path, recovery, trouble(4), steps=14, every=1000)
    assert [(e.step, e.action) for e in ledger_lines(tmp_path, rung["do"])] == [(4 + LATE, rung["do"])]
    assert Progress.of(trainer).skipped == (2 if rung["do"] == "skip" else 0)


@pytest.mark.parametrize("kind", ["auto", "fsdp2"])
def test_single_remedies_wait_for_nothing(kind: str, tmp_path: Path) -> None:
    others = [LRBackoff(factor=0.5, kinds="drill"), ScriptedSkip(steps=[6, 8]), trouble(4)]
    strategy = "auto" if kind == "auto" else FSDP2Strategy()
    trainer, _ = run(tmp_path, Recovery([{"do": "stop"}], {}), *others, strategy=strategy, steps=12, every=1000)
    assert (trainer.global_step, Progress.of(trainer).skipped) == (12, 2)
