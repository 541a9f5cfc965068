"""Whole fits on ranks in two dimensions: data-parallel by tensor-parallel, copies by shards."""

from __future__ import annotations

import math
import os
import signal
import unittest.mock
from pathlib import Path
from typing import Any

import rank_scenarios
import rank_scenarios_fp16  # noqa: F401 - its scenarios share the launch
import torch
import torch.distributed as dist
from by_hand import whole
from lightning.pytorch import Callback, Trainer
from rank_scenarios import NaNGradient, fit2, main, rank, scenario, shared_folder
from tiny_gpt_run import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    Fit,
    equal_bits,
    fit,
    largest_difference,
    tiny_module,
    whole_weights,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from lit_stable.callbacks import AccumulationWindows, GracefulStop, Progress
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size
from lit_stable.model import sharding
from lit_stable.model.attention_context import AttentionContext
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import Block
from lit_stable.model.loss import sample_losses
from lit_stable.model.norm import LayerNorm
from lit_stable.model.tensor_parallel import split_block
from lit_stable.module import GPTModule
from lit_stable.strategies.gradients import average_copied_gradients, average_whole_gradients
from lit_stable.strategies.mesh import MeshOptions
from lit_stable.strategies.predivide import Predivide

TENSOR, COPIES, BOTH = MeshOptions(tensor_parallel=2), MeshOptions(replicate=2), MeshOptions(2, 2)
#: Every kind of parameter, so that every placement of one is met.
ALL_KINDS: dict[str, Any] = {"bias": True, "qk_norm": "rmsnorm", "embed_norm": True, "n_head": 4}


def fit4(mesh: MeshOptions, strategy: str = "fsdp2", **options: Any) -> Fit:
    return fit(strategy, devices=4, accelerator=rank_scenarios.ACCELERATOR, mesh=mesh, **options)


#: Models that between them have every option that is split, that sees a part of the heads, or that the gradient of a
#: copy depends on; (steps left to themselves, z-loss, options). Four, because some of them make more of a rounding with
#: every step: one process with weights moved by a unit in the last place is 1e-5 from itself at step 5 of "per_head".
#: From there to the twelfth, each step begins with the weights that one process had there.
SPLIT_MODELS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "plain": (20, 0.0, {**ALL_KINDS, "mlp": "swiglu", "d_ff": 64}),
    "per_head": (
        *(4, 1e-2),
        {
            **{"bias": True, "n_head": 4, "n_kv_head": 2, "position": "alibi", "qk_norm": "l2"},
            **{"norm_position": "normformer", "norm_gain": "zero_centred", "stable_embedding": True},
            **{"tied": False, "head_fp32": True},
        },
    ),
    "written_out": (
        *(4, 0.0),
        {
            **{"bias": True, "n_head": 4, "n_kv_head": 2, "position": "rope", "qk_norm": "layernorm", "mlp": "swiglu"},
            **{"d_ff": 64, "norm_position": "sandwich", "attention_soft_cap": 5.0, "qk_layer_scaling": "megatron"},
            **{"document_mask": True, "document_separator": 3, "logit_soft_cap": 30.0, "residual_fp32": True},
        },
    ),
    "behind_sublayers": (
        *(4, 1e-2),
        {
            **{
                "n_head": 4,
                "norm": "rmsnorm",
                "norm_position": "post_sublayer",
                "qk_layer_scaling": "hf_inverse_layer",
            },
            **{"attention_scale": "pre_sqrt", "embed_grad_shrink": [(1, 0.1), (3, 0.5)], "embed_scale": "sqrt_d"},
            **{"document_mask": True, "document_separator": 3, "reset_positions": True},
        },
    ),
}


def split_fit(model: str, recompute: bool = False) -> dict[str, Any]:
    """Options of a fit with dropout whose windows are short, since splitting tiny matrices is slow."""
    steps, z_loss, options = SPLIT_MODELS[model]
    module = tiny_module(recompute=recompute, z_loss=z_loss, n_layer=2, dropout=0.1, **options)
    windows = AccumulationWindows(4, MICRO_BATCH)
    return {"module": module, "steps": max(steps, 12), "windows": windows, "validates": False}


def leave_alone(folder: Path, accelerator: str = "cpu") -> None:
    """Fit each of these models in this process, and leave what came of it to the ranks of a launch in this folder."""
    for model in SPLIT_MODELS:
        gradients = Gradients()
        alone = fit(accelerator=accelerator, callbacks=(gradients,), **split_fit(model))
        left = {"rows": alone.rows, "weights": [*gradients.weights, alone.weights], "gradients": gradients.steps}
        torch.save(left, folder / f"{model}.pt")


class Gradients(Callback):
    """Every gradient of every step and the weights before it, whole, as the optimizer finds them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        grads = {name: parameter.grad for name, parameter in pl_module.named_parameters()}
        whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
        self.steps.append({name: g.cpu().clone() for name, g in whole.items()})
        self.weights.append(whole_weights(pl_module))


class SetWeights(Callback):
    """After so many steps, begin every step with given weights."""

    def __init__(self, weights: list[dict[str, torch.Tensor]], after: int) -> None:
        self.weights, self.after = weights, after
        self.reached: dict[str, torch.Tensor] | None = None  # by itself

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        progress = Progress.of(trainer)
        if progress.steps >= self.after and progress.pending_samples == MICRO_BATCH:
            self.reached = self.reached or whole_weights(pl_module)
            options = StateDictOptions(full_state_dict=True, strict=False)
            set_model_state_dict(pl_module, dict(self.weights[progress.steps]), options=options)


# -- two processes ---------------------------------------------------------------------------------------------------


def _split(model: str) -> dict[str, Any]:
    """All steps, blocks recomputed, beside those that one process left in a file before the launch."""
    alone = torch.load(Path(os.environ["SCENARIO_FOLDER"]) / f"{model}.pt")
    gradients, free = Gradients(), SPLIT_MODELS[model][0]
    weights = SetWeights(alone["weights"], free)
    run = fit2("fsdp2", mesh=TENSOR, callbacks=(gradients, weights), **split_fit(model, recompute=True))
    pairs = list(zip(gradients.steps, alone["gradients"], strict=True))
    apart = {name: max(apart_of(name, *pair) for pair in pairs) for name in gradients.steps[0]}
    return {
        "rows": run.rows,
        "alone": alone["rows"],
        "gradients": apart,
        "zero": sorted(name for name in apart if not any(mine[name].any() for mine, _ in pairs)),
        "weights": largest_difference(weights.reached or run.weights, alone["weights"][free]),
        "steps": len(gradients.steps),
        "copies": copies_agree(run),
    }


@scenario
def split_plain() -> dict[str, Any]:
    return _split("plain")


@scenario
def split_per_head() -> dict[str, Any]:
    return _split("per_head")


@scenario
def split_written_out() -> dict[str, Any]:
    return _split("written_out")


@scenario
def split_behind_sublayers() -> dict[str, Any]:
    return _split("behind_sublayers")


def apart_of(name: str, mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """How far a gradient is from another, relative to its length; one that is a sum of large terms that cancel is
    rounded as those are, so a hundredth of the whole gradient's length counts too."""
    whole = torch.stack([g.norm() for g in theirs.values()]).norm()
    return ((mine[name] - theirs[name]).norm() / (theirs[name].norm() + whole / 100)).item()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def copies_agree(run: Fit) -> bool:
    """Whether what ranks hold in common is equal on them, bit for bit."""
    common = {}
    for name, parameter in run.module.named_parameters():
        if not isinstance(parameter, DTensor):
            common[name] = parameter.detach().cpu()
        elif all(p.is_replicate() or parameter.device_mesh.size(i) == 1 for i, p in enumerate(parameter.placements)):
            common[name] = parameter.to_local().detach().cpu()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, common)
    return bool(common) and all(equal_bits(gathered[0], other) for other in gathered)


class NormedMLP(nn.Module):
    """With a norm over the hidden units, of which each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


@scenario
def norm_inside_the_mlp() -> dict[str, Any]:
    """A block whose MLP has a norm: output and gradients, whole and split."""
    mesh = _mesh((1, 2))
    found = []
    for split in (False, True):
        torch.manual_seed(3)
        config = GPTConfig(n_head=4, d_model=32, vocab_size=8, max_length=8, qk_norm="rmsnorm", bias=True)
        block = Block(config)
        block.mlp = NormedMLP()
        for parameter in block.parameters():
            nn.init.normal_(parameter, 0.5, 0.3)
        if split:
            split_block(block, mesh["tensor_parallel"])
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(4), requires_grad=True)
        y = block(x, AttentionContext(config, 8, None, "sdpa", x.device))
        (y * torch.linspace(-1, 1, 32)).sum().backward()
        optimizer = torch.optim.SGD(block.parameters(), lr=0.0)
        average_whole_gradients(optimizer) if split else None
        grads = {
            n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in block.named_parameters()
        }
        found.append({**grads, "output": y.detach(), "input": x.grad})
    return {name: relative(found[1][name], found[0][name]) for name in found[0]}


@scenario
def gradients_that_differ() -> dict[str, Any]:
    """What ranks hold in common gets the mean of their gradients, and one that a rank did not use counts as zero."""
    mesh = _mesh((1, 2))
    split = nn.Linear(2, 2)
    parallelize_module(split, mesh["tensor_parallel"], RowwiseParallel())  # its bias is a copy on every rank
    whole = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD([*split.parameters(), *whole.parameters()], lr=0.0)
    for parameter in split.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().fill_(float(rank()))
    used = whole.weight.grad = torch.full((1, 1), 8.0)
    if rank() == 1:
        whole.weight.grad = None
    average_whole_gradients(optimizer)
    average_copied_gradients(optimizer)
    locals_: list[Any] = [None, None]
    dist.all_gather_object(locals_, [split.bias.grad.to_local()[0].item(), split.weight.grad.to_local()[0, 0].item()])
    return {"bias and weight": locals_, "whole": used.item()}


@scenario
def gradients_of_one_rank() -> dict[str, Any]:
    """Of parameters that one rank, both, and none have used: what the ranks step on, and how far that moves them."""
    mesh = _mesh((1, 2))
    split = nn.Linear(2, 2)
    parallelize_module(split, mesh["tensor_parallel"], RowwiseParallel())
    wholes = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("of_one", "of_both", "of_none")})
    copied = nn.ParameterDict({"copy_of_one": split.bias, "copy_of_none": nn.Parameter(torch.zeros_like(split.bias))})
    parameters = {name: p for part in (wholes, copied) for name, p in part.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for name in ("of_one", "of_both", "copy_of_one"):
        if rank() == 0 or name == "of_both":
            parameters[name].grad = torch.full_like(parameters[name].detach(), 2.0 + 2 * rank())
    before = {name: _local(p).clone() for name, p in parameters.items()}
    average_whole_gradients(optimizer)
    average_copied_gradients(optimizer)
    grads = {name: None if p.grad is None else _local(p.grad).tolist() for name, p in parameters.items()}
    optimizer.step()
    moved = {name: not torch.equal(before[name], _local(p)) for name, p in parameters.items()}
    weights = {name: _local(p).tolist() for name, p in parameters.items()}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, [grads, moved, weights])
    return {"grads": both[0][0], "moved": both[0][1], "alike": both[0] == both[1]}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))


@scenario
def compiled_tensor() -> dict[str, Any]:
    """Blocks that are split and compiled train the same."""
    plain, compiled = (fit2("fsdp2", mesh=TENSOR, steps=4, compile=c, **ALL_KINDS) for c in ("off", "on"))
    return {"plain": plain.rows, "compiled": compiled.rows}


@scenario
def compiled_gradients() -> dict[str, Any]:
    """How far gradients of a split GPT that is compiled are from those of one that is not; loss compiled too."""
    models: tuple[dict[str, Any], ...] = ({"position": "rope", "tied": False}, {"position": "alibi"}, {"bias": True})
    apart = {}
    for options in models:
        plain, compiled = (_gradients_of_split(how, **options) for how in ("off", "blocks"))
        assert compiled.keys() == plain.keys()
        apart.update({f"{options} {name}": apart_of(name, compiled, plain) for name in plain})
    return apart


def _gradients_of_split(compile: sharding.Compiled, **options: Any) -> dict[str, torch.Tensor]:
    def compiled(function: Any, fixed_shapes: bool = True) -> Any:
        return torch.compile(function, backend="aot_eager", dynamic=False)

    torch._dynamo.reset()
    data, tensor = (_mesh((1, 2))[name] for name in ("data_parallel", "tensor_parallel"))
    config = GPTConfig(vocab_size=64, n_layer=2, n_head=4, d_model=32, max_length=16, **options)
    with unittest.mock.patch.object(sharding, "_compiled", compiled):
        split = {"mesh": data, "tensor_mesh": tensor, "compile": compile}
        gpt = sharding.build_gpt(config, seed=1, device=torch.device("cpu"), **split)
    ids = torch.arange(32).reshape(2, 16) * 7 % 64
    losses_of = sample_losses if compile == "off" else compiled(sample_losses)
    losses_of(gpt(ids), ids * 3 % 64)[0].sum().backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in gpt.named_parameters()}
    return {name: whole(gradient) for name, gradient in gradients.items()}


@scenario
def two_copies() -> dict[str, Any]:
    return {"rows": fit2("fsdp2", mesh=COPIES, steps=4, **ALL_KINDS).rows}


# -- four processes --------------------------------------------------------------------------------------------------


#: Options of the straight fits.
STRAIGHT = {**ALL_KINDS, "steps": 3, "n_layer": 1, "tied": False, "head_fp32": True}


def _straight(mesh: MeshOptions) -> dict[str, Any]:
    run = fit4(mesh, **STRAIGHT)
    place = (data_parallel_rank(run.trainer), data_parallel_size(run.trainer))
    places: list[Any] = [None] * 4
    dist.all_gather_object(places, place)
    return {
        "rows": run.rows,
        "weights": {name: tensor.tolist() for name, tensor in run.weights.items()},
        "validation": float(run.trainer.callback_metrics["val/loss"]),
        "places": places,
        "mark": list(Progress.of(run.trainer).mark),
        "copies": copies_agree(run),
    }


@scenario
def straight_tensor() -> dict[str, Any]:
    return _straight(TENSOR)


@scenario
def straight_copies() -> dict[str, Any]:
    return _straight(COPIES)


@scenario
def straight_copies_by_tensor() -> dict[str, Any]:
    return _straight(BOTH)


@scenario
def predivided_tensor() -> dict[str, Any]:
    return _predivided(TENSOR)


@scenario
def predivided_copies() -> dict[str, Any]:
    return _predivided(COPIES)


def _predivided(mesh: MeshOptions) -> dict[str, Any]:
    """Gradients divided by 32 before ranks add them up."""
    config = {name: value for name, value in STRAIGHT.items() if name != "steps"}
    module = tiny_module(**config)
    module.gradient_predivide = 32.0
    largest: list[float] = []
    divide = Predivide.before

    def before(mean: Predivide, gradient: torch.Tensor) -> torch.Tensor:
        largest.append(gradient.abs().max().item())
        return divide(mean, gradient)

    Predivide.before = before  # type: ignore[method-assign]
    try:
        return {
            "rows": fit4(mesh, steps=STRAIGHT["steps"], module=module, validates=False).rows,
            "largest": max(largest),
        }
    finally:
        Predivide.before = divide  # type: ignore[method-assign]


class State(Callback):
    """Whole weights and moments, as they are at the start and after a micro-batch, where they are also saved."""

    def __init__(self, path: Path | None = None, micro_batch: int = 0) -> None:
        self.path, self.micro_batch, self.count = path, micro_batch, 0
        self.at_start: dict[str, list[float]] = {}
        self.at_save: dict[str, list[float]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.at_start = self._whole(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.count += 1
        if self.count == self.micro_batch:
            self.at_save = self._whole(trainer, pl_module)
            trainer.save_checkpoint(self.path)

    def _whole(self, trainer: Trainer, pl_module: Any) -> dict[str, list[float]]:
        states = trainer.optimizers[0].state
        tensors = dict(pl_module.named_parameters())
        for name, parameter in pl_module.named_parameters():
            tensors |= {f"{name} {kind}": states[parameter][kind] for kind in ("exp_avg", "exp_avg_sq")}
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
        return {name: t.detach().flatten().tolist() for name, t in whole.items()}


def _resume(mesh: MeshOptions, **options: Any) -> dict[str, Any]:
    """From inside a window, with dropout, on the same mesh: bit for bit."""
    options = {**STRAIGHT, "dropout": 0.1, **options}
    state = State(shared_folder() / "a.ckpt", 3)
    straight = fit4(mesh, callbacks=(state,), **options)
    again = fit4(mesh, ckpt_path=state.path, **options)
    return {
        "bits": equal_bits(straight.weights, again.weights),
        "rows": again.rows == straight.rows[3 - len(again.rows) :],
        "steps": [row[0] for row in again.rows],
        "marks": [list(Progress.of(run.trainer).mark) for run in (straight, again)],
        "copies": copies_agree(again),
        "checkpoint": str(state.path),
        "saved": state.at_save,
    }


@scenario
def resume_tensor() -> dict[str, Any]:
    return _resume(TENSOR)


@scenario
def resume_copies() -> dict[str, Any]:
    return _resume(COPIES, windows=AccumulationWindows(2 * GLOBAL_BATCH, MICRO_BATCH))


@scenario
def resume_copies_by_tensor() -> dict[str, Any]:
    return _resume(BOTH)


@scenario
def one_file_on_another_mesh() -> dict[str, Any]:
    """Written by two by two, read by copies of shards."""
    state, loaded = State(shared_folder() / "a.ckpt", 3), State()
    straight = fit4(TENSOR, strategy="fsdp2_full", callbacks=(state,), **STRAIGHT)
    again = fit4(COPIES, strategy="fsdp2_full", callbacks=(loaded,), ckpt_path=state.path, **STRAIGHT)
    return {
        "loaded": loaded.at_start == state.at_save,
        "difference": largest_difference(straight.weights, again.weights),
        "checkpoint": str(state.path),
        "saved": state.at_save,
    }


@scenario
def file_of_one_device() -> dict[str, Any]:
    """Go on from what one process wrote before the launch."""
    one = Path(os.environ["SCENARIO_FOLDER"]) / "one"
    run = fit4(TENSOR, ckpt_path=one / "m4.ckpt", **STRAIGHT)
    return {"rows": run.rows, "difference": largest_difference(run.weights, torch.load(one / "weights.pt"))}


class BadLossOnTheLastRank(GPTModule):
    """In step 2 the loss of rank 3, and of no other, is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        bad = rank() == 3 and self.trainer.global_step == 1
        return super().training_step(batch, batch_idx) * (math.nan if bad else 1.0)


@scenario
def nan_in_one_copy() -> dict[str, Any]:
    """A loss of one shard of one copy turns NaN: through the reductions it reaches all, and none may step."""
    config = {name: value for name, value in STRAIGHT.items() if name != "steps"}
    module = tiny_module(**config)
    module.__class__ = BadLossOnTheLastRank
    run = fit4(COPIES, module=module, steps=3, validates=False)
    counts = sorted({int(s["step"]) for s in run.trainer.optimizers[0].state.values()})
    norms = [row[3] if math.isfinite(row[3]) else None for row in run.rows]
    ranks: list[Any] = [None] * 4
    dist.all_gather_object(ranks, [norms, Progress.of(run.trainer).skipped, counts])
    return {"ranks": ranks, "mark": list(Progress.of(run.trainer).mark), "copies": copies_agree(run)}


@scenario
def nan_and_signal_on_one_rank() -> dict[str, Any]:
    """One rank's piece of a matrix turns NaN at step 2: none may step. At step 3 that rank is told to end: all do."""
    folder = shared_folder()

    class Kill(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2 and rank() == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    stop = GracefulStop(str(folder))
    run = fit4(
        TENSOR, nan=NaNGradient(2, only_rank=3), callbacks=(Kill(), stop), validates=False, **{**STRAIGHT, "steps": 50}
    )
    counts = sorted({int(state["step"]) for state in run.trainer.optimizers[0].state.values()})
    mine = [run.trainer.global_step, Progress.of(run.trainer).skipped, counts, stop.signal]
    ranks: list[Any] = [None] * 4
    dist.all_gather_object(ranks, mine)
    return {"ranks": ranks, "files": sorted(p.name for p in folder.iterdir())}


if __name__ == "__main__":
    main()
