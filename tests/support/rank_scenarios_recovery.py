"""Stepping back on two ranks; see rank_scenarios.py."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from contract_fits import gathered
from rank_scenarios import main, scenario, shared_folder
from recovery_project import BATCH, RUNGS, Data, Module, ShardedModule, ids_by_the_ledger, items, make_trainer
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


def _trainer(folder: Path, strategy: str, recovery: Recovery | None = None) -> Any:
    kind = FSDP2Strategy(timeout_minutes=2) if strategy == "fsdp2" else strategy
    return make_trainer(folder, STEPS, devices=2, strategy=kind, recovery=recovery)


def _rescued(strategy: str) -> dict[str, Any]:
    folder = shared_folder()
    module = (ShardedModule if strategy == "fsdp2" else Module)(ONE_RANK)
    trainer = _trainer(folder, strategy)
    fit_with_recovery(trainer, module, Data())
    # What this rank has read last at each step; both together are the step.
    read = gathered([module.ids[step] for step in range(1, STEPS + 1)])
    ids = [first + second for first, second in zip(*read, strict=True)]
    own = gathered([trainer.global_step, Progress.of(trainer).dropped, Progress.of(trainer).samples])
    return {
        "rewinds": [
            [e.step, e.done["to"], e.done["dropped"]] for e in read_ledger(folder / FILE) if e.action == "rewind"
        ],
        "reads_what_the_ledger_says": ids == ids_by_the_ledger(folder / FILE, 1, STEPS, 2 * BATCH),
        "poison_read": len(ONE_RANK.intersection(i for step in ids for i in step)),
        "ranks_agree": own[0] == own[1],
        "equals_the_clean_run": _equals_clean(strategy, whole_weights(module), read),
    }


def _equals_clean(strategy: str, weights: dict[str, torch.Tensor], read: list[list[list[int]]]) -> bool:
    """A run that is given those items and nothing else, on as many ranks."""

    class Given(Data):
        leaves_out_dropped = True

        def train_dataloader(self) -> Any:
            from recovery_project import Rows
            from torch.utils.data import DataLoader

            return DataLoader(Rows(), batch_sampler=read[self.trainer.global_rank])

    module = (ShardedModule if strategy == "fsdp2" else Module)()
    trainer = _trainer(shared_folder(), strategy)
    fit_with_recovery(trainer, module, Given())
    clean = whole_weights(module)
    return all(torch.equal(weights[name], clean[name]) for name in clean)


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
        fit_with_recovery(_trainer(folder, "ddp", recovery), Module(ONE_RANK), Data())
    except RecoveryStopped as error:
        said = str(error)
    return gathered(said)


if __name__ == "__main__":
    main()
