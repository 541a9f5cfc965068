"""Freezing, and clipping by the largest element, with two processes; see rank_scenarios.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rank_scenarios
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from rank_scenarios import NaNGradient, fit2, main, scenario, shared_folder
from tiny_fit import TinyData
from tiny_gpt_run import SaveEveryMicroBatch, equal_bits, whole_weights
from tiny_vlm_run import FROZEN, PairData, vlm_module
from torch import nn
from torch.distributed.fsdp import fully_shard

from lit_stable.callbacks import GradNorm, LayerNormFreeze, Progress, SafeCheckpoints, global_grad_norm

STEPS = 5  # of the GPT; its learning rate is 0 in the first
#: Blocks frozen for good but for their norms, which are free from step 3 on.
RULES: list[Any] = [{"modules": ["gpt.blocks"], "norms": "except"}, {"modules": ["gpt.blocks"], "stop": 3}]
WINDOW: list[Any] = [{"start": 2, "stop": 4}]


class WeightsBySteps(Callback):
    """Every parameter, gathered, before the first step and after each."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.seen[0] = whole_weights(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if not Progress.of(trainer).pending_samples:
            self.seen[Progress.of(trainer).steps] = whole_weights(pl_module)

    def moved(self) -> dict[str, list[bool]]:
        steps = range(1, len(self.seen))
        return {
            name: [not torch.equal(self.seen[s][name], self.seen[s - 1][name]) for s in steps] for name in self.seen[0]
        }


def ranks_agree(weights: dict[str, torch.Tensor]) -> bool:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, weights)
    return equal_bits(*gathered)


@scenario
def vlm_fsdp2() -> dict[str, Any]:
    """New blocks between the layers of a frozen model, sharded apart from it; straight, and resumed in mid-window."""
    folder, watch, options = shared_folder(), WeightsBySteps(), {"qk_norm": "rmsnorm"}
    callbacks = (LayerNormFreeze(FROZEN), watch, SaveEveryMicroBatch(folder, only=[5]))
    straight = fit2("fsdp2", steps=STEPS, module=vlm_module(**options), data=PairData(), callbacks=callbacks)
    path = folder / "m5.ckpt"
    other = {"module": vlm_module(**options), "data": PairData(), "callbacks": (LayerNormFreeze(FROZEN),)}
    again = fit2("fsdp2", steps=STEPS, ckpt_path=path, **other)
    return {
        "moved": watch.moved(),
        "ranks_agree": ranks_agree(straight.weights),
        "rows": straight.rows,
        "resumed": equal_bits(again.weights, straight.weights) and again.rows == straight.rows[-len(again.rows) :],
    }


def _gpt(strategy: str, rules: list[Any]) -> dict[str, Any]:
    """Straight, with saves, resumed from those, and resumed from the saves of a resumed run."""
    folder, second = shared_folder(), shared_folder()
    watch = WeightsBySteps()
    straight = fit2(strategy, steps=STEPS, callbacks=(LayerNormFreeze(rules), watch))
    fit2(strategy, steps=STEPS, callbacks=(LayerNormFreeze(rules), SaveEveryMicroBatch(folder, only=(0, 4, 5))))

    def resumed(path: Path, *callbacks: Callback) -> bool:
        run = fit2(strategy, steps=STEPS, ckpt_path=path, callbacks=(LayerNormFreeze(rules), *callbacks))
        return equal_bits(run.weights, straight.weights) and run.rows == straight.rows[-len(run.rows) :]

    return {
        "moved": watch.moved(),
        "ranks_agree": ranks_agree(straight.weights),
        "rows": straight.rows,
        "resumed": [
            resumed(folder / "m0.ckpt"),
            resumed(folder / "m5.ckpt", SaveEveryMicroBatch(second, only=(2,))),
            resumed(second / "m2.ckpt"),
        ],
        "checkpoint": str(folder / "m4.ckpt"),
    }


@scenario
def norms_window_ddp() -> dict[str, Any]:
    return _gpt("ddp", WINDOW)


@scenario
def norms_window_fsdp2() -> dict[str, Any]:
    return _gpt("fsdp2", WINDOW)


@scenario
def backbone_ddp() -> dict[str, Any]:
    return _gpt("ddp", RULES)


@scenario
def backbone_fsdp2() -> dict[str, Any]:
    return _gpt("fsdp2", RULES)


@scenario
def backbone_fsdp2_full() -> dict[str, Any]:
    return _gpt("fsdp2_full", RULES)


class Sharded(LightningModule):
    """Somebody else's: norms are sharded like all else, and the optimizer holds what is frozen for good."""

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
        if self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def count_batch(self, batch: torch.Tensor) -> tuple[int, int]:
        """Every rank sees the same samples, so that any number of ranks has the same gradients: a share for each."""
        return len(batch) // self.trainer.world_size, batch.numel() // self.trainer.world_size

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - batch.roll(1, dims=1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


def fit_sharded(
    devices: int, *callbacks: Callback, sharded: bool = True, resume: str | None = None
) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """A fit whose first layer is frozen for good, and its norm until step 3; (trainer, weights)."""
    trainer = Trainer(
        accelerator=rank_scenarios.ACCELERATOR,
        devices=devices,
        strategy=ModelParallelStrategy(devices, 1, save_distributed_checkpoint=sharded),
        max_steps=4,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            LayerNormFreeze([{"modules": ["net.0"], "norms": "except"}, {"stop": 3}]),
            SafeCheckpoints(),
            *callbacks,
        ],
    )
    trainer.fit(module := Sharded(), TinyData(), ckpt_path=resume)
    return trainer, whole_weights(module)


def _sharded(sharded: bool) -> dict[str, Any]:
    folder, second = shared_folder(), shared_folder()
    watch = WeightsBySteps()
    _, straight = fit_sharded(2, watch, SaveEveryMicroBatch(folder, only=(1, 2)), sharded=sharded)
    _, again = fit_sharded(2, SaveEveryMicroBatch(second, only=(1,)), sharded=sharded, resume=str(folder / "m1.ckpt"))
    trainer, third = fit_sharded(2, sharded=sharded, resume=str(second / "m1.ckpt"))
    return {
        "moved": watch.moved(),
        "resumed": [equal_bits(again, straight), equal_bits(third, straight)],
        "counts": [int(state["step"]) for state in trainer.optimizers[0].state.values()],
        "weights": {name: tensor.tolist() for name, tensor in straight.items()},
        "checkpoint": str(folder / "m2.ckpt"),
    }


@scenario
def stock_strategy_sharded() -> dict[str, Any]:
    return _sharded(True)


@scenario
def stock_strategy_full() -> dict[str, Any]:
    return _sharded(False)


@scenario
def largest_element() -> dict[str, Any]:
    """The inf norm over shards equals that of the gathered gradients, and a NaN on one rank is seen on both."""
    box: dict[str, Any] = {"norm": [], "reference": []}

    class Compare(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in pl_module.parameters()]
            box["reference"].append(torch.stack([g.abs().max() for g in grads]).max().item())
            box["norm"].append(GradNorm.of(trainer).measure(optimizer, "inf").item())

    fit2("fsdp2", steps=2, callbacks=(Compare(),))
    values: dict[int, list[Any]] = {}
    for rank in (0, 1):
        seen: list[float] = []

        class Note(Callback):
            def on_before_optimizer_step(
                self, trainer: Trainer, pl_module: Any, optimizer: Any, seen: Any = seen
            ) -> None:
                seen.append(global_grad_norm(pl_module.parameters(), norm_type="inf").item())

        fit2("fsdp2", steps=1, nan=NaNGradient(1, only_rank=rank), callbacks=(Note(),))
        values[rank] = [None, None]
        dist.all_gather_object(values[rank], seen)
    return {**box, "with_nan": [values[0], values[1]]}


if __name__ == "__main__":
    main()
