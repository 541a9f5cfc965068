"""Orders and checks of devices on two ranks; run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import rank_scenarios
import torch
from lightning.pytorch import Callback
from rank_scenarios import fit2, main, rank, scenario, shared_folder
from tiny_gpt_run import equal_bits

from lit_stable.callbacks import (
    BlackBox,
    Detectors,
    EffectiveLR,
    Event,
    Events,
    Progress,
    RepeatCheck,
    RunControl,
    emit,
)
from lit_stable.callbacks.control_orders import new_order, place, read_ledger
from lit_stable.callbacks.events import read_events
from lit_stable.callbacks.surge import Surge
from lit_stable.devices.check_devices import check_devices


class Orders(Callback):
    """Somebody gives orders while rank 1 trains, and rank 0 may see them a moment later or sooner."""

    def __init__(self, folder: Path, plan: dict[int, str]) -> None:
        self.folder, self.plan = folder, plan
        self.rates: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.own = trainer.optimizers[0].param_groups[0]["lr"]
        words = self.plan.pop(Progress.of(trainer).steps, None)
        if words and rank() == 1:
            place(self.folder, new_order(words))
        if words:
            trainer.strategy.barrier()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if Progress.of(trainer).pending_samples:
            return
        effective = next((c for c in trainer.callbacks if isinstance(c, EffectiveLR)), None)
        used = effective.used["lr"][0] if effective and effective.used else self.own
        self.rates[Progress.of(trainer).steps] = used


def steered(strategy: str, folder: Path, plan: dict[int, str], **options: Any) -> tuple[Any, Orders, RunControl]:
    control, orders = RunControl(folder=str(folder)), Orders(folder, plan)
    return fit2(strategy, steps=6, callbacks=(control, orders), **options), orders, control


def _orders(strategy: str) -> dict[str, Any]:
    folder = shared_folder()
    straight, straight_orders, _ = steered(strategy, folder, {1: "save", 2: "lr*=0.5"})
    resumed, again, _ = steered(strategy, folder, {}, ckpt_path=folder / "asked-step=2.ckpt")
    stopping, _, control = steered(strategy, shared_folder(), {3: "stop"})
    own = {k: v for k, v in straight_orders.rates.items() if k > 2}
    ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(ranks, [straight_orders.rates, again.rates == own])
    return {
        "alike": ranks[0] == ranks[1] and ranks[0][1],
        "rates": {str(step): rate for step, rate in straight_orders.rates.items()},
        "resumed": equal_bits(straight.weights, resumed.weights),
        "stopped": [stopping.trainer.global_step, control.stopped],
        "ledger": [[done.step, done.action] for done in read_ledger(folder)],
    }


class LogsAlone(Callback):
    """Rank 0 logs what grows; the other ranks log nothing of it, or another number."""

    def __init__(self, own: bool) -> None:
        self.own = own

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = Progress.of(trainer).steps
        if rank() == 0 or self.own:
            pl_module.log("mine/grows", 2.0**step if rank() == 0 else 1.0, rank_zero_only=not self.own)


@scenario
def a_surge_that_one_rank_sees() -> list[Any]:
    found: list[Any] = []
    for own in (False, True):
        surge = Surge(signals=["mine/*"], window=20, warmup=5, factor=2.0)
        others = dict.fromkeys(("spike", "slow_divergence", "plateau", "low_loss"))
        told: list[int] = []
        detectors = Detectors(surge=surge, **others)
        run = fit2("ddp", steps=26, validates=False, callbacks=(LogsAlone(own), detectors, Listens(told)))
        ranks: list[Any] = [None, None]
        torch.distributed.all_gather_object(ranks, told)
        found.append([len(run.rows), *ranks])
    return found


class Listens(Callback):
    def __init__(self, told: list[int]) -> None:
        self.told = told

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        Events.of(trainer).listeners["test"] = lambda event: self.told.append(event.step)


@scenario
def orders_ddp() -> dict[str, Any]:
    return _orders("ddp")


@scenario
def orders_fsdp2() -> dict[str, Any]:
    return _orders("fsdp2")


class Alarms(Callback):
    """Tells of an event of one rank at the end of step 3, of all at the end of step 4."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        Events.of(trainer).folder = self.folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step, ends = trainer.global_step, not Progress.of(trainer).pending_samples
        if ends and step == 3 and rank() == 1:
            emit(trainer, Event(step, "alone", {}, rank=1))
        if ends and step == 4:
            emit(trainer, Event(step, "together", {}))


@scenario
def black_box_fsdp2() -> dict[str, Any]:
    folder = shared_folder()
    run = fit2("fsdp2", steps=5, callbacks=(Alarms(folder), BlackBox(steps=2)))
    bare = fit2("fsdp2", steps=5)
    run.trainer.strategy.barrier()
    found = {
        str(p.relative_to(folder / "blackbox")): json.loads(p.read_text()) for p in folder.glob("blackbox/*/*.json")
    }
    return {"found": found, "rows": run.rows, "same": equal_bits(run.weights, bare.weights)}


class FlippedBit(Callback):
    """Flips the lowest bit of a gradient of the embedding on rank 1, in one of the backward passes."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        passes = itertools.count(1)

        def flip(gradient: torch.Tensor) -> torch.Tensor:
            if next(passes) == AT and rank() == 1:
                gradient = gradient.clone()
                gradient.view(torch.int32).view(-1)[5] ^= 1
            return gradient

        pl_module.gpt.wte.weight.register_hook(flip)


#: On each rank step 1 has 2 backward passes of its own and 4 of the check; step 2 has 2, then 2 of the check.
AT = 6 + 2 + 2


@scenario
def repeat_check_ddp() -> dict[str, Any]:
    folder, check = shared_folder(), RepeatCheck(every_steps=1)
    run = fit2("ddp", steps=3, callbacks=(check, FlippedBit(), Alarms(folder)))
    bare = fit2("ddp", steps=3)
    run.trainer.strategy.barrier()
    found = [[event.step, event.kind, event.evidence] for event in read_events(folder / "events.jsonl")]
    mismatches = float(run.trainer.callback_metrics["stability/repeat_mismatches"])
    return {"events": found, "same": equal_bits(run.weights, bare.weights), "mismatches": mismatches}


@scenario
def repeat_check_fsdp2() -> dict[str, Any]:
    run = fit2("fsdp2", steps=3, callbacks=(RepeatCheck(every_steps=1),))
    bare = fit2("fsdp2", steps=3)
    mismatches = float(run.trainer.callback_metrics["stability/repeat_mismatches"])
    return {"same": equal_bits(run.weights, bare.weights), "mismatches": mismatches}


def _checked(**faults: Any) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = check_devices(2, accelerator="cuda" if rank_scenarios.ACCELERATOR == "gpu" else "cpu", **faults)
    return {"code": code, "page": out.getvalue()}


@scenario
def devices_that_are_well() -> dict[str, Any]:
    return _checked()


@scenario
def a_device_that_multiplies_wrong() -> dict[str, Any]:
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = left @ right
        result[0, 0] += rank()
        return result

    return _checked(product=product)


@scenario
def a_device_that_sends_wrong() -> dict[str, Any]:
    def sent(tensor: torch.Tensor) -> torch.Tensor:
        tensor[7] += rank()
        return tensor

    return _checked(sent=sent)


if __name__ == "__main__":
    main()
