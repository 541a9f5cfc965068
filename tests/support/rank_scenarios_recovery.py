"""Stepping back on two ranks; see rank_scenarios.py."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_scenarios
from contract_fits import gathered
from fsdp1_on_cpu import FSDP1OnCPU
from full_disk import files_of_at_most
from lightning.pytorch import Callback
from rank_scenarios import main, rank, scenario, shared_folder
from recovery_project import (
    BATCH,
    RUNGS,
    WIDTH,
    Data,
    Module,
    ShardedModule,
    clean_run,
    ids_by_the_ledger,
    items,
    make_trainer,
)
from tiny_gpt_run import equal_bits, whole_weights
from torch import nn
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from lit_stable.callbacks import Progress, Recovery, fit_with_recovery
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.recovery_exit import RecoveryStopped
from lit_stable.callbacks.recovery_ledger import FILE, read_ledger
from lit_stable.strategies.fsdp1 import FSDP1Strategy
from lit_stable.strategies.fsdp2 import FSDP2Strategy
from lit_stable.strategies.launcher import launched_devices

STEPS = 26
#: An item that rank 1 reads at step 12, and one that rank 0 reads at step 20 of a run without the first window.
FIRST, SECOND = items(1)(11 * 2 * BATCH + BATCH), items(1)(23 * 2 * BATCH)
ONE_RANK = {FIRST, SECOND}

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)


def _two(strategy: str, precision: str = "32-true") -> dict[str, Any]:
    kind: Any = FSDP2Strategy(timeout_minutes=2) if strategy == "fsdp2" else strategy
    if strategy == "fsdp":
        kind = FSDP1Strategy if rank_scenarios.ACCELERATOR == "gpu" else FSDP1OnCPU
        kind = kind(auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=_is_the_first_layer))
    where = {"devices": 2, "strategy": kind, "accelerator": rank_scenarios.ACCELERATOR}
    return where if precision == "32-true" else {**where, "precision": precision}


def _is_the_first_layer(module: nn.Module) -> bool:
    """So that the wrapper around the whole model has parameters of its own, as that of a GPT has."""
    return isinstance(module, nn.Linear) and module.in_features == WIDTH


def _rescued(strategy: str, precision: str = "32-true") -> dict[str, Any]:
    folder, options = shared_folder(), _two(strategy, precision)
    module = (ShardedModule if strategy == "fsdp2" else Module)(ONE_RANK)
    trainer = make_trainer(folder, STEPS, **options)
    fit_with_recovery(trainer, module, Data())
    own = [module.ids[step] for step in range(1, STEPS + 1)]
    return judged(trainer, module, folder, own, strategy, precision)


def judged(
    trainer: Any,
    module: Module,
    folder: Path,
    own: list[list[int]],
    strategy: str = "ddp",
    precision: str = "32-true",
) -> dict[str, Any]:
    """What a finished run came to; ``own``: what this rank has read last at each step. Both together are the step."""
    ids = [first + second for first, second in zip(*gathered(own), strict=True)]
    state = gathered([trainer.global_step, Progress.of(trainer).dropped, Progress.of(trainer).samples])
    weights = whole_weights(module)  # under FSDP1 this rank's pieces
    clean = (ShardedModule if strategy == "fsdp2" else Module)()
    clean = whole_weights(clean_run(folder / "clean", own, clean, **_two(strategy, precision)))
    equal = gathered(equal_bits(weights, clean))
    rewinds = [entry for entry in read_ledger(folder / FILE) if entry.action == "rewind"]
    return {
        "rewinds": [[rewind.step, rewind.done["dropped"]] for rewind in rewinds],
        "targets": [rewind.done["to"] for rewind in rewinds],
        "reads_what_the_ledger_says": ids == ids_by_the_ledger(folder / FILE, 1, STEPS, 2 * BATCH),
        "poison_read": len(ONE_RANK.intersection(i for step in ids for i in step)),
        "ranks_agree": state[0] == state[1],
        "equals_the_clean_run": all(equal),
    }


@scenario
def rescued_ddp() -> dict[str, Any]:
    return _rescued("ddp")


@scenario
def rescued_fsdp2() -> dict[str, Any]:
    return _rescued("fsdp2")


@scenario
def rescued_fsdp() -> dict[str, Any]:
    return _rescued("fsdp")


@scenario
def rescued_fsdp_bf16_mixed() -> dict[str, Any]:
    return _rescued("fsdp", "bf16-mixed")


@scenario
def rescued_fsdp_bf16_true() -> dict[str, Any]:
    return _rescued("fsdp", "bf16-true")


@contextmanager
def two_nodes_of_one_process() -> Iterator[dict[str, Any]]:
    """What a launcher says there: each process is the first of its node; options of the trainer."""
    with pytest.MonkeyPatch.context() as patch:
        node = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"]}
        for name, value in node.items():
            patch.setenv(name, value)
        yield launched_devices() or {}


@scenario
def nodes_with_one_folder() -> dict[str, Any]:
    """Of the ranks that are first on their node only one reads and writes."""
    folder = shared_folder()
    module = Module(ONE_RANK)
    with two_nodes_of_one_process() as launched:
        trainer = make_trainer(folder, 14, **{**_two("ddp"), **launched})
        fit_with_recovery(trainer, module, Data(), ckpt_path="auto")
        ranks = gathered([trainer.local_rank, trainer.node_rank, trainer.global_rank, trainer.global_step])
    lines = read_ledger(folder / FILE)
    return {
        "launched": launched,
        "ranks": ranks,
        "rewinds": [entry.step for entry in lines if entry.action == "rewind"],
        "lines_once": [entry.number for entry in lines] == list(range(1, len(lines) + 1)),
    }


@scenario
def nodes_with_folders_of_their_own() -> list[str]:
    """The second node finds nothing where the first finds a checkpoint."""
    folder = shared_folder() / f"node-{rank()}"
    folder.mkdir()
    said = ""
    with two_nodes_of_one_process() as launched:
        options = {**_two("ddp"), **launched}
        trainer = make_trainer(folder, 2, every=2, **options)
        fit_with_recovery(trainer, Module(), Data())
        try:
            fit_with_recovery(make_trainer(folder, 4, **options), Module(), Data(), ckpt_path="auto")
        except MisconfigurationException as error:
            said = str(error)
    return gathered(said)


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
