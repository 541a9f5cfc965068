"""Norms inserted with two processes, and new runs with the weights of others; see rank_scenarios.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_scenarios import ACCELERATOR, main, rank, scenario, shared_folder
from rank_scenarios_layout import copies_agree
from surgery_fits import BEFORE, BOTH, before, operated, within
from tiny_gpt_run import SaveEveryMicroBatch, equal_bits, fit, tiny_module

from lit_stable.run.surgery import SurgeryOptions
from lit_stable.strategies.mesh import MeshOptions

TWO: dict[str, Any] = {"devices": 2, "accelerator": ACCELERATOR}


def _goes_on(source: str, strategy: str) -> dict[str, Any]:
    folder = shared_folder()
    checkpoint = before(folder / "before", source, **TWO)
    dist.barrier()
    straight, look = operated(checkpoint, strategy, folder=folder, **TWO)
    resumed, again = operated(within(folder, **TWO), strategy, options=SurgeryOptions(), **TWO)
    reset, zero = operated(checkpoint, strategy, SurgeryOptions(BOTH, "reset"), steps=BEFORE + 1, **TWO)
    found = {
        "rows": straight.rows,
        "factors": [look.factors, again.factors],
        "counts": look.counts,
        "bits": equal_bits(straight.weights, resumed.weights),
        "still": equal_bits(reset.weights, zero.weights),
        "left": sum(float(moment.abs().sum()) for moment in zero.moments.values()),
        "sums": {name: float(weight.double().sum()) for name, weight in straight.weights.items()},
        "folder": checkpoint.is_dir(),
    }
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    return {**found, "agree": gathered[0] == gathered[1]}


@scenario
def file_of_ddp_under_ddp() -> dict[str, Any]:
    return _goes_on("ddp", "ddp")


@scenario
def file_of_ddp_under_fsdp2() -> dict[str, Any]:
    return _goes_on("ddp", "fsdp2")


@scenario
def folder_under_fsdp2() -> dict[str, Any]:
    return _goes_on("fsdp2", "fsdp2")


@scenario
def folder_on_two_by_tensor() -> dict[str, Any]:
    """From two shards to two halves of every matrix: the new norms see a part of the heads each, or what is summed."""
    checkpoint = before(shared_folder() / "before", "fsdp2", **TWO)
    dist.barrier()
    run, look = operated(checkpoint, "fsdp2", mesh=MeshOptions(tensor_parallel=2), **TWO)
    return {
        "rows": run.rows,
        "factors": look.factors,
        "counts": look.counts,
        "sums": {name: float(weight.double().sum()) for name, weight in run.weights.items()},
        "copies": copies_agree(run),
    }


@scenario
def begins_with_weights() -> dict[str, Any]:
    """Each kind of checkpoint under each strategy, at rate 0."""
    equal = {}
    for source in ("ddp", "fsdp2"):
        folder: Path = shared_folder()
        trained = fit(source, steps=1, callbacks=(SaveEveryMicroBatch(folder, only=(2,)),), **TWO)
        dist.barrier()
        for strategy in ("ddp", "fsdp2"):
            module = tiny_module()
            module.initial_weights = folder / "m2.ckpt"
            begun = fit(strategy, steps=1, module=module, **TWO)
            own = equal_bits(begun.weights, trained.weights)
            ranks = torch.tensor([float(own)])
            dist.all_reduce(ranks)
            equal[f"{source} {strategy}"] = ranks.item() == 2
    return {"equal": equal, "rank": rank()}


if __name__ == "__main__":
    main()
