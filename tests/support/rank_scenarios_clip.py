"""Clipping by parts and by updates with two processes; see rank_scenarios.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from rank_scenarios import NaNGradient, fit2, main, rank, scenario, shared_folder
from tiny_gpt_run import Fit, SaveEveryMicroBatch, equal_bits

from lit_stable.callbacks import GradClip, GradNorm, Progress, UpdateClip
from lit_stable.callbacks.ada_gc import AdaGC

STEPS = 5  # the learning rate is 0 in the first


class PerTensor(Callback):
    """Per step: what was learned of each tensor, and what was clipped."""

    def __init__(self, clip: GradClip) -> None:
        self.clip = clip
        self.rows: list[list[dict[str, Any]]] = []
        self.norms: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(GradNorm.of(trainer).measure_each(optimizer).tolist())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if not Progress.of(trainer).pending_samples:
            names = ("clip_frac", "update_clip_frac", "update_clip_rms_max")
            logged = {name: trainer.callback_metrics[f"stability/{name}"].item() for name in names}
            self.rows.append([self.clip.state_dict()["ada_gc"], logged])


def run(fit: Any, *callbacks: Callback, **options: Any) -> tuple[Fit, PerTensor]:
    """A fit of the tiny GPT, each tensor clipped by its own history, each update by its size."""
    clip = GradClip(ada_gc=AdaGC(warmup_steps=2, rel_threshold=1.0))
    rows = PerTensor(clip)
    options = {"steps": STEPS, "bias": True, "qk_norm": "rmsnorm", **options}
    return fit(clip=clip, callbacks=(UpdateClip(0.99), rows, *callbacks), **options), rows


def gathered(value: Any) -> list[Any]:
    box: list[Any] = [None, None]
    dist.all_gather_object(box, value)
    return box


class WholeNorms(Callback):
    """Norms of the gathered gradients, before anything clips them."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.rows.append([(g.full_tensor() if hasattr(g, "full_tensor") else g).norm().item() for g in grads])


def _parts(strategy: str, bad_rank: int) -> dict[str, Any]:
    """Straight, with a NaN in one gradient of one rank, with saves, and resumed in mid-window."""
    folder = shared_folder()
    whole = WholeNorms()
    straight, rows = run(fit2, strategy=strategy, nan=whole)
    bad, bad_rows = run(fit2, strategy=strategy, nan=NaNGradient(4, only_rank=bad_rank))
    saving, _ = run(fit2, SaveEveryMicroBatch(folder, only=(4, 5)), strategy=strategy)
    again, tail = run(fit2, strategy=strategy, ckpt_path=folder / "m5.ckpt")
    learned = [row[0] for row in bad_rows.rows]
    return {
        "rows": rows.rows,
        "norms": rows.norms,
        "whole_norms": whole.rows,
        "weights": {name: weight.tolist() for name, weight in straight.weights.items()},
        "ranks_agree": [len({repr(r) for r in gathered(watch.rows)}) == 1 for watch in (rows, bad_rows)],
        "skipped": gathered(Progress.of(bad.trainer).skipped),
        "learned_by_then": [learned[3] == learned[2], learned[4] == learned[2]],
        "saving_changes_nothing": equal_bits(straight.weights, saving.weights),
        "resumed": [equal_bits(straight.weights, again.weights), tail.rows == rows.rows[2:]],
        "checkpoint": str(folder / "m4.ckpt"),
    }


@scenario
def parts_ddp() -> dict[str, Any]:
    return _parts("ddp", rank())  # after the reduction, which gives every rank the NaN of any


@scenario
def parts_fsdp2() -> dict[str, Any]:
    return _parts("fsdp2", 1)


@scenario
def parts_fsdp() -> dict[str, Any]:
    """FSDP1, whose pieces are nobody's shards to look at."""
    _, rows = run(fit2, strategy="fsdp")
    return {"rows": rows.rows, "norms": rows.norms, "ranks_agree": len({repr(r) for r in gathered(rows.rows)}) == 1}


if __name__ == "__main__":
    main()
