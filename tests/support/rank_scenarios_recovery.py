"""Stepping back on two ranks; see rank_scenarios.py."""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import rank_scenarios
import torch
from contract_fits import gathered
from full_disk import files_of_at_most
from lightning.pytorch import Callback
from rank_scenarios import main, scenario, shared_folder
from recovery_project import (
    BATCH,
    RUNGS,
    Data,
    Module,
    ShardedModule,
    clean_run,
    ids_by_the_ledger,
    items,
    make_trainer,
)
from tiny_gpt_run import whole_weights

from lit_stable.callbacks import Progress, Recovery, fit_with_recovery
from lit_stable.callbacks.recovery_exit import RecoveryStopped
from lit_stable.callbacks.recovery_ledger import FILE, read_ledger
from lit_stable.strategies.fsdp2 import FSDP2Strategy

STEPS = 26
#: An item that rank 1 reads at step 12, and one that rank 0 reads at step 20 of a run without the first window.
FIRST, SECOND = items(1)(11 * 2 * BATCH + BATCH), items(1)(23 * 2 * BATCH)
ONE_RANK = {FIRST, SECOND}

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)


def _two(strategy: str) -> dict[str, Any]:
    kind = FSDP2Strategy(timeout_minutes=2) if strategy == "fsdp2" else strategy
    return {"devices": 2, "strategy": kind, "accelerator": rank_scenarios.ACCELERATOR}


def _rescued(strategy: str) -> dict[str, Any]:
    folder = shared_folder()
    module = (ShardedModule if strategy == "fsdp2" else Module)(ONE_RANK)
    trainer = make_trainer(folder, STEPS, **_two(strategy))
    fit_with_recovery(trainer, module, Data())
    return judged(trainer, module, folder, [module.ids[step] for step in range(1, STEPS + 1)], strategy)


def judged(trainer: Any, module: Module, folder: Path, own: list[list[int]], strategy: str = "ddp") -> dict[str, Any]:
    """What a finished run came to; ``own``: what this rank has read last at each step. Both together are the step."""
    ids = [first + second for first, second in zip(*gathered(own), strict=True)]
    state = gathered([trainer.global_step, Progress.of(trainer).dropped, Progress.of(trainer).samples])
    weights = whole_weights(module)
    clean = (ShardedModule if strategy == "fsdp2" else Module)()
    clean = whole_weights(clean_run(folder / "clean", own, clean, **_two(strategy)))
    rewinds = [entry for entry in read_ledger(folder / FILE) if entry.action == "rewind"]
    return {
        "rewinds": [[rewind.step, rewind.done["dropped"]] for rewind in rewinds],
        "targets": [rewind.done["to"] for rewind in rewinds],
        "reads_what_the_ledger_says": ids == ids_by_the_ledger(folder / FILE, 1, STEPS, 2 * BATCH),
        "poison_read": len(ONE_RANK.intersection(i for step in ids for i in step)),
        "ranks_agree": state[0] == state[1],
        "equals_the_clean_run": all(torch.equal(weights[name], clean[name]) for name in clean),
    }


@scenario
def rescued_ddp() -> dict[str, Any]:
    return _rescued("ddp")


@scenario
def rescued_fsdp2() -> dict[str, Any]:
    return _rescued("fsdp2")


@scenario
def stopped_together() -> list[str]:
    folder = shared_folder()
    control = [{**r, **({"drop": False, "max_times": 1} if r["do"] == "rewind" else {})} for r in RUNGS]
    said = ""
    try:
        recovery = Recovery(control, {"not_finite": "rewind"})
        trainer = make_trainer(folder, STEPS, recovery=recovery, **_two("ddp"))
        fit_with_recovery(trainer, Module(ONE_RANK), Data())
    except RecoveryStopped as error:
        said = str(error)
    return gathered(said)


class Fills(Callback):
    """The disk of rank 0's ledger is full from step 11 on."""

    def __init__(self, ledger: Path) -> None:
        self.ledger, self.stack = ledger, ExitStack()

    def on_before_optimizer_step(self, trainer: Any, *rest: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 10:
            self.stack.enter_context(files_of_at_most(self.ledger.stat().st_size))

    def on_exception(self, *rest: Any) -> None:
        self.stack.close()


@scenario
def full_disk() -> dict[str, Any]:
    folder = shared_folder()
    trainer = make_trainer(folder, STEPS, Fills(folder / FILE), **_two("ddp"))
    said = ""
    try:
        fit_with_recovery(trainer, Module(ONE_RANK), Data())
    except RecoveryStopped as error:
        said = str(error)
    written = [e.action for e in read_ledger(folder / FILE) if e.action in ("rewind", "stop")]
    return {"said": gathered(said), "written": written}


if __name__ == "__main__":
    main()
