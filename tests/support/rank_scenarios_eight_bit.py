"""8-bit Adam on two and four gloo processes; see rank_scenarios.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from eight_bit_models import Kinds, converted, differing, digest, eight_bit, planned, train, whole, whole_states
from fsdp1_on_cpu import FSDP1OnCPU
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from rank_scenarios import fit2, main, scenario, shared_folder
from tiny_fit import TinyData
from tiny_gpt_run import Fit, SaveEveryMicroBatch, equal_bits, fit, largest_difference, whole_weights
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_stable.callbacks import AccumulationWindows, Progress, eight_bit_adam

STEPS = 3  # two micro-batches each; the rate of the first is 0


class NoteStates(Callback):
    """The optimizer's whole states as training starts, after a load, and at its end."""

    def __init__(self) -> None:
        self.at: dict[str, dict[str, dict[str, torch.Tensor]]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.at["start"] = whole_states(pl_module, trainer.optimizers[0])

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.at["end"] = whole_states(pl_module, trainer.optimizers[0])


# -- steps on shards ---------------------------------------------------------------------------------------------------


def _process_group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def _against_whole(shard: Callable[[nn.Module], None]) -> dict[str, Any]:
    """Weights and states of a sharded model in which they differ from one process's after a few steps."""
    alone, sharded = Kinds(), Kinds()
    shard(sharded)
    ours, theirs = converted(sharded), converted(alone)
    train(sharded, ours)
    train(alone, theirs)
    weights = differing({n: whole(p) for n, p in sharded.named_parameters()}, dict(alone.named_parameters()))
    states = differing(whole_states(sharded, ours), whole_states(alone, theirs))
    kept = {name: len(state) for name, state in whole_states(sharded, ours).items()}
    placements = sorted({str(p.placements) for p in sharded.parameters() if hasattr(p, "placements")})
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sorted(weights + states))
    return {"differing": found, "eight_bit": [n for n, keys in kept.items() if keys == 5], "placements": placements}


def _mesh(*sizes: int, names: tuple[str, ...] = ("data_parallel", "tensor_parallel")) -> DeviceMesh:
    _process_group()
    return init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])


def _fully_shard(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, ignored_params=set(model.norm.parameters()))


@scenario
def steps_fsdp2() -> dict[str, Any]:
    mesh = _mesh(int(os.environ["WORLD_SIZE"]))
    found = _against_whole(lambda model: _fully_shard(model, mesh))
    _fully_shard(sharded := Kinds(), mesh)
    # `even` has 32768 elements, of which a rank holds a half or less.
    plans = [planned(model, min_8bit_size=30_000).tensors.values() for model in (sharded, Kinds())]
    return {**found, "planned": [[[plan.name, plan.bits, plan.num_bytes] for plan in kept] for kept in plans]}


@scenario
def steps_hybrid() -> dict[str, Any]:
    mesh = _mesh(2, 2, names=("replicate", "shard"))
    return _against_whole(lambda model: _fully_shard(model, mesh))


@scenario
def steps_fsdp2_over_tp() -> dict[str, Any]:
    """Rows cut at a block (512 over 2), through blocks (600 and 97 over 2), and shards of shards of rows."""
    mesh = _mesh(2, 2)

    def shard(model: nn.Module) -> None:
        plan = {"even": RowwiseParallel(), "odd": RowwiseParallel(), "short": RowwiseParallel()}
        parallelize_module(model, mesh["tensor_parallel"], {**plan, "one": ColwiseParallel()})
        _fully_shard(model, mesh["data_parallel"])

    return _against_whole(shard)


@scenario
def steps_tp() -> dict[str, Any]:
    """Four pieces of each row: of 512 elements through no block's end, of 300 elements with an empty last one."""
    mesh = _mesh(4, names=("tensor_parallel",))

    def shard(model: nn.Module) -> None:
        for name in ("even", "odd", "short", "one"):
            module = getattr(model, name)
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(1)]))
        model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, [Replicate()]))

    return _against_whole(shard)


@scenario
def unplaceable() -> dict[str, Any]:
    """Cuts that blocks cannot follow: rows cut twice, and cut in three dimensions."""
    mesh = _mesh(2, 2)
    cuts = {"even.weight": [Shard(1), Shard(1)], "experts": [Replicate(), Shard(2)]}
    said = []
    for name, placements in cuts.items():
        model = Kinds()
        owner, _, last = name.rpartition(".")
        owner = model.get_submodule(owner)
        setattr(owner, last, nn.Parameter(distribute_tensor(getattr(owner, last).detach(), mesh, placements)))
        said.append(_refusal(lambda model=model: converted(model)))
    return {"said": said}


def _refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return str(error)
    return "nothing was refused"


# -- whole fits --------------------------------------------------------------------------------------------------------


def _fit(strategy: Any, *callbacks: Callback, steps: int = STEPS, ckpt_path: Any = None, **options: Any) -> Fit:
    # No gradient is clipped: the last bit of the norm depends on how gradients are cut.
    given = {"max_norm": 1e9, "validates": False, **options}
    return fit2(strategy, steps=steps, callbacks=callbacks, ckpt_path=ckpt_path, **given)


@dataclass
class Saved:
    """Where one strategy's checkpoints lie, and the states that a resume found in ``m3.ckpt``."""

    folder: Path
    states: dict[str, Any]


SAVED: dict[str, Saved] = {}


def _resumes(strategy: str, points: tuple[int, ...] = (3,)) -> dict[str, Any]:
    """With a save after some micro-batches, and resumed from each; the last in the middle of a window."""
    folder, note = shared_folder(), NoteStates()
    straight = _fit(strategy, eight_bit(), note, SaveEveryMicroBatch(folder, only=points))
    resumed, apart = {}, {}
    for point in points:
        again = NoteStates()
        run = _fit(strategy, eight_bit(), again, ckpt_path=folder / f"m{point}.ckpt")
        states = differing(again.at["end"], note.at["end"])
        resumed[str(point)] = [
            equal_bits(run.weights, straight.weights),
            states,
            run.rows == straight.rows[point // 2 :],
        ]
        apart[str(point)] = largest_difference(run.weights, straight.weights)
        SAVED[strategy] = Saved(folder, again.at["start"])
    return {
        "resumed": resumed,
        "apart": apart,
        "uint8": sum(v.dtype == torch.uint8 for state in note.at["end"].values() for v in state.values()),
        "measured": float(straight.trainer.callback_metrics["stability/state_bytes_per_parameter"]),
        "checkpoint": str(folder / "m3.ckpt"),
        "digest": digest(SAVED[strategy].states),
        "weights": {name: tensor.tolist() for name, tensor in straight.weights.items()},
    }


@scenario
def resume_ddp() -> dict[str, Any]:
    return _resumes("ddp")


@scenario
def resume_fsdp2() -> dict[str, Any]:
    return _resumes("fsdp2", (0, 3))


@scenario
def resume_fsdp2_full() -> dict[str, Any]:
    return _resumes("fsdp2_full")


@scenario
def without_saves() -> dict[str, Any]:
    return {"weights": {name: tensor.tolist() for name, tensor in _fit("fsdp2", eight_bit()).weights.items()}}


@scenario
def same_weights() -> dict[str, Any]:
    """DDP and FSDP2 with the same gradients, bit for bit: one micro-batch a step, so that both sum in one order."""
    notes, runs = (NoteStates(), NoteStates()), []
    for strategy, note in zip(("ddp", "fsdp2"), notes, strict=True):
        runs.append(_fit(strategy, eight_bit(), note, windows=AccumulationWindows(4, 2)))
    return {
        "weights": equal_bits(runs[0].weights, runs[1].weights),
        "states": differing(notes[0].at["end"], notes[1].at["end"]),
    }


@scenario
def states_of_checkpoint() -> dict[str, Any]:
    """What all ranks together find in the checkpoint that stands beside the results."""
    note, path = NoteStates(), Path(os.environ["SCENARIO_FOLDER"]) / "m0.ckpt"
    ranks = int(os.environ["WORLD_SIZE"])
    fit("fsdp2", devices=ranks, steps=3, ckpt_path=path, callbacks=(eight_bit(), note), max_norm=1e9)
    return {"digest": digest(note.at["start"])}


class Meshed(LightningModule):
    """Somebody else's: sharded over both dimensions of a mesh; the rows of its last layer are cut through a block."""

    def __init__(self, offloads: bool = False) -> None:
        super().__init__()
        self.policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 600), nn.Tanh(), nn.Linear(600, 4))
        parallelize_module(
            self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"], offload_policy=self.policy)

    def count_batch(self, batch: torch.Tensor) -> tuple[int, int]:
        """Every rank sees the same samples: a share for each."""
        ranks = self.device_mesh["data_parallel"].size()
        return len(batch) // ranks, batch.numel() // ranks

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - batch.roll(1, dims=1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit_meshed(
    ranks: int, parallel: int, *callbacks: Callback, resume: Any = None, steps: int = 4, offloads: bool = False
) -> Any:
    """A fit with so many tensor-parallel ranks out of all; (whole states at start and end, weights)."""
    note = NoteStates()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(ranks // parallel, parallel),
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Progress(), eight_bit(), note, *callbacks],
    )
    trainer.fit(module := Meshed(offloads), TinyData(), ckpt_path=resume)
    return note.at, whole_weights(module)


@scenario
def fit_with_tensor_parallelism() -> dict[str, Any]:
    """Its two ranks' weights and states, for one process to compare."""
    states, weights = fit_meshed(2, 2)
    torch.save([states["end"], weights], path := shared_folder() / "end.pt")
    return {"path": str(path)}


@scenario
def offloaded_on_a_cpu() -> dict[str, Any]:
    """Where the parameters lie on the run's device all the same, nothing is another's."""
    (kept, weights), (offloaded, same) = (fit_meshed(2, 1, steps=2, offloads=offloads) for offloads in (False, True))
    return {"weights": equal_bits(same, weights), "states": differing(offloaded["end"], kept["end"])}


@scenario
def fsdp1() -> dict[str, Any]:
    return {"said": _refusal(lambda: _fit(FSDP1OnCPU(), eight_bit()))}


@scenario
def fit_on_two_by_two() -> dict[str, Any]:
    folder, said = shared_folder(), []
    eight_bit_adam.rank_zero_info = said.append
    straight, weights = fit_meshed(4, 2, SaveEveryMicroBatch(folder, only=(2,)))
    again, same = fit_meshed(4, 2, resume=folder / "m2.ckpt")
    return {
        "resumed": [differing(again["end"], straight["end"]), equal_bits(same, weights)],
        "said": said[0].splitlines()[0],
        "eight_bit": sorted(name for name, state in again["start"].items() if "exp_avg_codes" in state),
        "digest": digest(again["start"]),
        "checkpoint": str(folder / "m2.ckpt"),
    }


def _refusals(strategy: str, wide: Path, narrow: Path) -> list[str]:
    return [
        _refusal(lambda: _fit(strategy, eight_bit(), ckpt_path=wide)),
        _refusal(lambda: _fit(strategy, ckpt_path=narrow)),
        _refusal(lambda: _fit(strategy, eight_bit(bits=32), ckpt_path=narrow)),
    ]


def _converts(strategy: str) -> dict[str, Any]:
    """A checkpoint of AdamW goes on in 8 bit; that one's goes back to 32 and is read by a plain AdamW again."""
    first, second, third = (shared_folder() for _ in range(3))
    narrow, wide, again = NoteStates(), NoteStates(), NoteStates()
    runs = [_fit(strategy, SaveEveryMicroBatch(first, only=(2,)))]
    own = (eight_bit(on_load="convert"), narrow, SaveEveryMicroBatch(second, only=(2,)))
    runs.append(_fit(strategy, *own, ckpt_path=first / "m2.ckpt", steps=2))
    own = (eight_bit(bits=32, on_load="convert"), wide, SaveEveryMicroBatch(third, only=(0,)))
    _fit(strategy, *own, ckpt_path=second / "m2.ckpt")
    runs.append(_fit(strategy, again, ckpt_path=third / "m0.ckpt"))
    notes = (narrow, wide, again)
    return {
        "paths": [str(first / "m2.ckpt"), str(second / "m2.ckpt")],
        "steps": [sorted({int(s["step"]) for s in note.at["start"].values()}) for note in notes],
        "keys": [sorted({k for s in note.at["start"].values() for k in s}) for note in notes],
        "largest": max(float(s["exp_avg"].abs().max()) for s in wide.at["start"].values()),
        "losses": [[row[1] for row in run.rows] for run in runs],
    }


@scenario
def convert_fsdp2() -> dict[str, Any]:
    found = _converts("fsdp2")
    return {**found, "refused": _refusals("fsdp2", *map(Path, found["paths"]))}


@scenario
def convert_fsdp2_full() -> dict[str, Any]:
    found = _converts("fsdp2_full")
    return {**found, "refused": _refusals("fsdp2_full", *map(Path, found["paths"]))}


@scenario
def file_of_ddp_for_fsdp2() -> dict[str, Any]:
    """One file that DDP wrote, in 8 and in 32 bit, goes on sharded; after `resume_ddp`."""
    plain, narrow, wide, twin = shared_folder(), NoteStates(), NoteStates(), NoteStates()
    _fit("fsdp2", eight_bit(), narrow, ckpt_path=SAVED["ddp"].folder / "m3.ckpt")
    _fit("ddp", SaveEveryMicroBatch(plain, only=(3,)), steps=2)
    _fit("fsdp2", eight_bit(on_load="convert"), wide, ckpt_path=plain / "m3.ckpt")
    _fit("ddp", eight_bit(on_load="convert"), twin, ckpt_path=plain / "m3.ckpt")
    return {
        "differing": differing(narrow.at["start"], SAVED["ddp"].states),
        "converted_differing": differing(wide.at["start"], twin.at["start"]),
    }


if __name__ == "__main__":
    main()
