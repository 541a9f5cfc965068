"""fp16 on several ranks: an overflow that one of them meets, and every precision in its turn."""

from __future__ import annotations

import itertools
import os
from typing import Any

import rank_scenarios
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from rank_scenarios import NaNGradient, fit2, scenario
from tiny_gpt_run import equal_bits, fit

from lit_stable.callbacks import Progress
from lit_stable.run.loss_scale_watch import LossScaleWatch
from lit_stable.strategies.loss_scale import LossScale
from lit_stable.strategies.mesh import ONE_COPY, MeshOptions
from lit_stable.strategies.precisions import PRECISIONS, precision_problem

#: What every rank has to tell of :func:`_overflow`.
OVERFLOWED = {
    "unchanged": True,
    "goes_on": True,
    "scales": [1024.0, 512.0, 512.0],
    "logged": 512.0,
    "skipped": 1,
    "steps": 2,
}


def _overflow(strategy: str, precision: str, mesh: MeshOptions) -> dict[str, Any]:
    """One element of one rank's gradients turns infinite at step 2: no rank steps, every rank halves the scale."""
    devices = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    of_copy = devices // mesh.replicate
    seen: dict[int, Any] = {}

    class Snapshot(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
            state = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in pl_module.named_parameters()}
            local = {name: tensor.detach().clone() for name, tensor in state.items()}
            seen[Progress.of(trainer).steps] = (local, trainer.precision_plugin.scaler.get_scale())

    run = fit(
        strategy,
        devices=devices,
        accelerator=rank_scenarios.ACCELERATOR,
        mesh=mesh,
        precision=precision,
        loss_scale=LossScale(init=1024.0, window=100),
        steps=3,
        validates=False,
        max_norm=None,
        n_layer=1,
        nan=NaNGradient(2, None if strategy == "ddp" else of_copy - 1, float("inf"), of_copy),
        callbacks=(Snapshot(), LossScaleWatch()),
    )
    mine = {
        "unchanged": equal_bits(seen[1][0], seen[2][0]),
        "goes_on": not equal_bits(seen[2][0], seen[3][0]),
        "scales": [seen[step][1] for step in (1, 2, 3)],
        "logged": float(run.trainer.callback_metrics["loss_scale"]),
        "skipped": Progress.of(run.trainer).skipped,
        "steps": max(int(s["step"]) for s in run.trainer.optimizers[0].state.values()),
    }
    gathered: list[Any] = [None] * devices
    dist.all_gather_object(gathered, mine)
    return {"ranks": gathered}


@scenario
def overflow_16_mixed() -> dict[str, Any]:
    return _overflow("fsdp2", "16-mixed", ONE_COPY)


@scenario
def overflow_16_true() -> dict[str, Any]:
    return _overflow("fsdp2", "16-true", ONE_COPY)


@scenario
def overflow_ddp() -> dict[str, Any]:
    """DDP's gradients are equal on all ranks: here they turn infinite on each."""
    return _overflow("ddp", "16-mixed", ONE_COPY)


@scenario
def overflow_fsdp() -> dict[str, Any]:
    return _overflow("fsdp", "16-mixed", ONE_COPY)


@scenario
def overflow_tensor() -> dict[str, Any]:
    return _overflow("fsdp2", "16-mixed", MeshOptions(tensor_parallel=2))


@scenario
def overflow_tensor_16_true() -> dict[str, Any]:
    return _overflow("fsdp2", "16-true", MeshOptions(tensor_parallel=2))


@scenario
def overflow_copies() -> dict[str, Any]:
    return _overflow("fsdp2", "16-mixed", MeshOptions(replicate=2))


@scenario
def overflow_copies_16_true() -> dict[str, Any]:
    return _overflow("fsdp2", "16-true", MeshOptions(replicate=2))


@scenario
def every_precision() -> dict[str, Any]:
    """Three steps in every cell of the matrix; the last loss and the dtypes of what is stored."""
    found = {}
    for strategy, precision in itertools.product(("ddp", "fsdp2", "fsdp"), PRECISIONS):
        if precision_problem(strategy, precision) is None:
            run = fit2(strategy, precision=precision, steps=3, n_layer=1, max_norm=None)
            found[f"{strategy} {precision}"] = [
                run.rows[-1][1],
                sorted({str(p.dtype) for p in run.module.parameters()}),
            ]
    return found
