"""What is tried with two processes, all in one launch: ``torchrun rank_scenarios.py RESULTS ACCELERATOR NAME...``.

Each scenario is a function that every rank runs; what rank 0 returns, plain data only, becomes a fixture's value. One
that raises on any rank stores its traceback instead, and only the test that asks for it fails.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
import unittest.mock
from pathlib import Path
from typing import Any

import one_mesh
import torch
import torch.distributed as dist
from fsdp1_on_cpu import FSDP1OnCPU
from lightning.pytorch import Callback, Trainer
from tiny_gpt_run import Fit, SaveEveryMicroBatch, equal_bits, fit, largest_difference
from torch.distributed.fsdp import FSDPModule, fully_shard

from lit_stable.callbacks import GracefulStop, GradNorm, Progress, global_grad_norm
from lit_stable.callbacks.checkpoint_files import shard_files
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size
from lit_stable.model import sharding
from lit_stable.strategies.mesh import MeshOptions

ACCELERATOR = "cpu"
SCENARIOS: dict[str, Any] = {}
_NUMBERS = itertools.count()
RESUMED_STEPS = 4


def scenario(function: Any) -> Any:
    SCENARIOS[function.__name__] = function
    return function


def shared_folder() -> Path:
    """One new folder for all ranks, also before there is a process group: every rank counts alike."""
    folder = Path(os.environ["SCENARIO_FOLDER"]) / f"shared-{next(_NUMBERS)}"
    folder.mkdir(exist_ok=True)
    return folder


def rank() -> int:
    return int(os.environ["RANK"])


def fit2(strategy: Any, **options: Any) -> Fit:
    return fit(strategy, devices=2, accelerator=ACCELERATOR, **options)


def fsdp1() -> Any:
    return "fsdp" if ACCELERATOR == "gpu" else FSDP1OnCPU()


def _straight(strategy: str) -> dict[str, Any]:
    run = fit2(strategy, bias=True, qk_norm="rmsnorm", embed_norm=True)
    weights = {name: tensor.tolist() for name, tensor in run.weights.items()}
    return {
        "rows": run.rows,
        "weights": weights,
        "validation": float(run.trainer.callback_metrics["val/loss"]),
        "ranks": [data_parallel_rank(run.trainer), data_parallel_size(run.trainer)],
    }


@scenario
def straight_ddp() -> dict[str, Any]:
    return _straight("ddp")


@scenario
def straight_fsdp2() -> dict[str, Any]:
    return _straight("fsdp2")


@scenario
def straight_fsdp() -> dict[str, Any]:
    return {"rows": fit2(fsdp1(), bias=True, qk_norm="rmsnorm", embed_norm=True).rows}


def _resume(strategy: str, points: tuple[int, ...], saves: Any = None, **options: Any) -> dict[str, Any]:
    """Straight; with saves after some micro-batches, by default those that are needed; and resumed from those."""
    folder = shared_folder()
    options = {"dropout": 0.1, **options}
    straight = fit2(strategy, steps=RESUMED_STEPS, **options)
    saving = fit2(strategy, steps=RESUMED_STEPS, callbacks=(SaveEveryMicroBatch(folder, saves or points),), **options)
    resumed = {}
    for point in points:
        again = fit2(strategy, steps=RESUMED_STEPS, ckpt_path=folder / f"m{point}.ckpt", **options)
        bits = equal_bits(straight.weights, again.weights)
        tail = straight.rows[-len(again.rows) :]
        apart = max(
            abs(a - b) for row, other in zip(again.rows, tail, strict=True) for a, b in zip(row, other, strict=True)
        )
        resumed[str(point)] = [bits, again.rows == tail, len(again.rows), apart]
    return {
        "saving_changes_nothing": equal_bits(straight.weights, saving.weights) and straight.rows == saving.rows,
        "saving_changes": largest_difference(straight.weights, saving.weights),
        "resumed": resumed,
        "files": sorted(p.name for p in folder.iterdir())[:3],
    }


@scenario
def resume_ddp() -> dict[str, Any]:
    return _resume("ddp", (0, 3, 4))


@scenario
def resume_fsdp2() -> dict[str, Any]:
    every = range(9) if ACCELERATOR == "cpu" else None
    return _resume("fsdp2", (0, 3, 4), every, bias=True)


@scenario
def resume_fsdp2_bf16() -> dict[str, Any]:
    return _resume("fsdp2", (3,), n_layer=1, precision="bf16-mixed", tied=False, head_fp32=True)


@scenario
def resume_fsdp2_full() -> dict[str, Any]:
    return _resume("fsdp2_full", (0, 3))


@scenario
def resume_fsdp() -> dict[str, Any]:
    return _resume("fsdp", (0, 3))


@scenario
def sharded_checkpoint_for_one_rank() -> dict[str, Any]:
    folder = shared_folder()
    straight = fit2("fsdp2", steps=RESUMED_STEPS, callbacks=(SaveEveryMicroBatch(folder, only=(4,)),))
    return {"checkpoint": str(folder / "m4.ckpt"), "rows": straight.rows}


@scenario
def file_of_one_device() -> dict[str, Any]:
    """Go on from what one process wrote before the launch."""
    one = Path(os.environ["SCENARIO_FOLDER"]) / "one"
    run = fit2("fsdp2", steps=4, bias=True, ckpt_path=one / "m12.ckpt")
    whole = torch.load(one / "weights.pt")
    return {"rows": run.rows, "difference": largest_difference(run.weights, whole)}


class NaNGradient(Callback):
    """Writes NaN, or another value, into one gradient element of one rank (None: of each) in one step.

    Copies of a shard have equal gradients: with a ``copy_size`` the rank is one of each copy.
    """

    def __init__(
        self, step: int, only_rank: int | None, value: float = float("nan"), copy_size: int | None = None
    ) -> None:
        self.step, self.only_rank, self.value, self.copy_size = step, only_rank, value, copy_size

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        place = trainer.global_rank % (self.copy_size or trainer.world_size)
        if trainer.global_step + 1 == self.step and self.only_rank in (None, place):
            # A matrix, of which every rank has a piece of its own; under FSDP1 pieces have one dimension.
            grad = max((p.grad for p in pl_module.parameters() if p.grad is not None), key=torch.numel)
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            local.view(-1)[0] = self.value


def _nan_on_one_rank(strategy: Any) -> dict[str, Any]:
    """One rank's shard alone turns NaN at step 3: no rank may step, and the run must equal one that stops at 2."""
    box: dict[str, Any] = {}

    class Snapshot(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            state = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in pl_module.named_parameters()}
            box[Progress.of(trainer).steps] = {name: tensor.detach().clone() for name, tensor in state.items()}

    run = fit2(strategy, steps=4, callbacks=(Snapshot(),), nan=NaNGradient(3, only_rank=1), validates=False)
    # Of a piece that is empty nothing is stepped.
    counts = [int(s["step"]) for p, s in run.trainer.optimizers[0].state.items() if p.numel()]
    unchanged = [None, None]
    dist.all_gather_object(unchanged, equal_bits(box[2], box[3]))
    return {"skipped": Progress.of(run.trainer).skipped, "unchanged": unchanged, "counts": [min(counts), max(counts)]}


@scenario
def nan_on_one_rank() -> dict[str, Any]:
    return _nan_on_one_rank("fsdp2")


@scenario
def nan_on_one_rank_fsdp1() -> dict[str, Any]:
    return _nan_on_one_rank(fsdp1())


@scenario
def norm_of_a_mix() -> dict[str, Any]:
    """Plain and sharded gradients together, one rank without any gradient of its own: equal to a plain norm."""
    box: dict[str, Any] = {}

    class Compare(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in pl_module.parameters()]
            box["reference"] = torch.cat([g.flatten().double() for g in grads]).norm().item()
            box["norm"] = GradNorm.of(trainer).value.item()
            box["kinds"] = sorted({type(p).__name__ for p in pl_module.parameters()})

    run = fit2("fsdp2", steps=2, callbacks=(Compare(),), n_layer=1, d_model=4, n_head=1)
    for parameter in run.module.parameters():
        if rank() == 1 and hasattr(parameter, "to_local"):  # whole parameters have equal gradients on all ranks
            parameter.grad = None
    half = global_grad_norm(run.module.parameters()).item()
    values: list[Any] = [None, None]
    dist.all_gather_object(values, half)
    return {**box, "agree": values[0] == values[1]}


@scenario
def stop_on_one_ranks_signal() -> dict[str, Any]:
    """SIGTERM reaches rank 1 alone, in mid-window: both stop after the same step, with one checkpoint."""
    return _stopped_by(signal.SIGTERM)


@scenario
def stop_on_one_ranks_notice() -> dict[str, Any]:
    """So does a scheduler's notice."""
    return _stopped_by(signal.SIGUSR1)


def _stopped_by(number: signal.Signals) -> dict[str, Any]:
    folder = shared_folder()

    class Kill(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2 and trainer.global_rank == 1:
                os.kill(os.getpid(), number)

    stop = GracefulStop(str(folder), also=["SIGUSR1"])
    run = fit2("fsdp2", steps=50, callbacks=(Kill(), stop), validates=False)
    steps: list[Any] = [None, None]
    dist.all_gather_object(steps, (run.trainer.global_step, stop.signal))
    return {"steps": steps, "files": sorted(p.name for p in folder.iterdir())}


@scenario
def damaged_shard() -> dict[str, Any]:
    """One byte of one file of a sharded checkpoint changes: every rank refuses, and names file and alternative."""
    folder = shared_folder()
    fit2("fsdp2", steps=2, callbacks=(SaveEveryMicroBatch(folder, only=(3, 4)),))
    victim = shard_files(folder / "m4.ckpt")[0]
    if rank() == 0:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    dist.barrier()
    try:
        fit2("fsdp2", steps=3, ckpt_path=folder / "m4.ckpt")
    except Exception as error:
        message = str(error)
    else:
        message = "nothing was refused"
    return {"message": message, "victim": str(victim), "alternative": str(folder / "m3.ckpt")}


@scenario
def compiled_blocks() -> dict[str, Any]:
    """Compiled under FSDP2: the same losses, one compilation for all blocks. A validation would add more."""
    plain = fit2("fsdp2", steps=3, n_layer=3, validates=False)
    torch._dynamo.reset()
    compiled = fit2("fsdp2", steps=3, compile="on", n_layer=3, validates=False)
    frames = torch._dynamo.utils.counters["frames"]
    return {"plain": plain.rows, "compiled": compiled.rows, "frames": dict(frames)}


@scenario
def compiled_fsdp1() -> dict[str, Any]:
    """The same under FSDP1, which puts views of its flat parameters in the place of weights."""
    options = {"steps": 3, "precision": "bf16-mixed", "embed_norm": True, "validates": False}
    plain, compiled = (fit2(fsdp1(), compile=how, **options).rows for how in ("off", "on"))
    return {"plain": plain, "compiled": compiled}


@scenario
def recomputed_blocks() -> dict[str, Any]:
    """Activation checkpointing with dropout: bit-equal to keeping activations."""
    kept = fit2("fsdp2", steps=3, dropout=0.1, validates=False)
    again = fit2("fsdp2", steps=3, dropout=0.1, validates=False, recompute=True)
    return {"difference": largest_difference(kept.weights, again.weights)}


@scenario
def blocks_gathered_alone() -> dict[str, Any]:
    """Blocks gathered one by one, and again in the backward pass, against all of them once."""
    together = fit2("fsdp2", steps=3, n_layer=3)
    with unittest.mock.patch.object(sharding, "UNIT_PARAMETERS", 0):
        alone = fit2("fsdp2", steps=3, n_layer=3, mesh=MeshOptions(reshard_after_forward=True))
    units = [
        len({id(fully_shard.state(m)) for m in run.module.modules() if isinstance(m, FSDPModule)})
        for run in (together, alone)
    ]
    return {"difference": largest_difference(together.weights, alone.weights), "units": units}


def main() -> None:
    results_path, accelerator, *names = sys.argv[1:]
    global ACCELERATOR
    ACCELERATOR = accelerator
    one_mesh.install()
    for name in names:
        try:
            result = SCENARIOS[name]()
        except BaseException:
            result = {"error": traceback.format_exc()}
            if dist.is_initialized() and rank() != 0:
                raise
        if rank() == 0:
            with open(results_path, "a") as file:  # each once: weights are long, and all ranks wait for them
                file.write(json.dumps({name: result}) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
