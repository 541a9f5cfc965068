"""Model and optimizer options, and the reduction of gradients, with two processes; see rank_scenarios.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fsdp1_on_cpu import FSDP1OnCPU
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import FSDPPrecision
from rank_scenarios import fit2, main, scenario, shared_folder
from tiny_gpt_run import Fit, SaveEveryMicroBatch, equal_bits, largest_difference, tiny_module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.module import GPTModule
from lit_stable.optim.options import OptimizerOptions, PatternOptions
from lit_stable.strategies import predivide
from lit_stable.strategies.fsdp2_precision import POLICIES

# Everything that keeps parameters, buffers or dtypes of its own, in two models.
MODELS: dict[str, dict[str, Any]] = {
    "one": {
        "position": "alibi",
        "norm_position": "normformer",
        "norm_gain": "zero_centred",
        "qk_norm": "l2",
        "n_head": 4,
        "n_kv_head": 2,
        "stable_embedding": True,
        "residual_fp32": True,
        "logit_soft_cap": 30.0,
        "embed_grad_shrink": [(1, 0.1), (3, 1.0)],
        "document_mask": True,
        "document_separator": 3,
    },
    "two": {
        "norm_position": "sandwich",
        "norm": "rmsnorm",
        "qk_norm": "rmsnorm",
        "mlp": "swiglu",
        "attention_soft_cap": 20.0,
        "qk_layer_scaling": "megatron",
        "tied": False,
        "head_fp32": True,
        "embed_scale": "sqrt_d",
        "init_overrides": {"wpe.weight": "sinusoidal", "head.weight": "xavier"},
        "bias": True,
    },
}
OPTIMIZERS = {
    "one": OptimizerOptions(
        decay="independent",
        decay_norms=True,
        patterns={"wte.*": PatternOptions(lr_factor=0.5), "blocks.0.*": PatternOptions(weight_decay=0.01)},
    ),
    "two": OptimizerOptions(name="sgd", momentum=0.9),
}


def module(name: str, **options: Any) -> GPTModule:
    shape = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "d_model": 32, "max_length": 16}
    config = GPTConfig(**{**shape, **MODELS[name], **options})
    return GPTModule(config, tiny_module().schedule, OPTIMIZERS[name], z_loss=1e-3)


def _agrees(strategy: str, name: str) -> dict[str, Any]:
    run = fit2(strategy, steps=4, module=module(name))
    return {"rows": run.rows, "weights": {key: value.tolist() for key, value in run.weights.items()}}


@scenario
def agrees_one_fsdp2() -> dict[str, Any]:
    return _agrees("fsdp2", "one")


@scenario
def agrees_two_fsdp2() -> dict[str, Any]:
    return _agrees("fsdp2", "two")


@scenario
def agrees_one_ddp() -> dict[str, Any]:
    return _agrees("ddp", "one")


def _resumes(name: str) -> dict[str, Any]:
    """In bf16, with dropout, from the middle of a window."""
    folder = shared_folder()

    def run(**more: Any) -> Fit:
        return fit2("fsdp2", steps=3, precision="bf16-mixed", module=module(name, dropout=0.1), **more)

    straight = run(callbacks=(SaveEveryMicroBatch(folder),))
    again = run(ckpt_path=folder / "m3.ckpt")
    dtypes = {str(p.dtype) for p in straight.module.parameters()}
    return {
        "equal": equal_bits(straight.weights, again.weights) and straight.rows[1:] == again.rows,
        "dtypes": sorted(dtypes),
    }


@scenario
def resumes_one() -> dict[str, Any]:
    return _resumes("one")


@scenario
def resumes_two() -> dict[str, Any]:
    return _resumes("two")


@scenario
def sgd_without_state() -> dict[str, Any]:
    """No momentum, so no state at all: torch's state getter takes its dummy step, and nothing may come of it."""
    folder = shared_folder()

    def run(*callbacks: Any, **more: Any) -> Fit:
        schedule, options = tiny_module().schedule, OptimizerOptions(name="sgd")
        own = GPTModule(tiny_module().config, schedule, options)
        return fit2("fsdp2", steps=3, module=own, callbacks=callbacks, **more)

    straight, saving = run(), run(SaveEveryMicroBatch(folder))
    again = run(ckpt_path=folder / "m2.ckpt")
    return {"equal": [equal_bits(straight.weights, other.weights) for other in (saving, again)]}


class Contributions:
    """The largest gradient that this rank handed to a collective of ours, with and without pre-division."""

    def __init__(self) -> None:
        self.largest = 0.0

    def __enter__(self) -> Contributions:
        self._before = predivide.Predivide.before

        def before(mean: predivide.Predivide, gradient: torch.Tensor) -> torch.Tensor:
            whole = gradient.abs().max().item()
            divided = self._before(mean, gradient)
            assert divided.abs().max().item() == whole / mean.factor  # a power of two
            self.largest = max(self.largest, whole)
            return divided

        predivide.Predivide.before = before  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        predivide.Predivide.before = self._before  # type: ignore[method-assign]


def _predivided(strategy: str) -> dict[str, Any]:
    """Factors that are powers of two change no bit of the mean."""
    config, schedule = tiny_module(bias=True).config, tiny_module().schedule
    plain = fit2(strategy, steps=3, module=GPTModule(config, schedule), validates=False)
    with Contributions() as seen:
        module = GPTModule(config, schedule, gradient_predivide=32.0)
        divided = fit2(strategy, steps=3, module=module, validates=False)
    return {"difference": largest_difference(plain.weights, divided.weights), "largest": seen.largest}


@scenario
def predivided_ddp() -> dict[str, Any]:
    return _predivided("ddp")


@scenario
def predivided_fsdp2() -> dict[str, Any]:
    return _predivided("fsdp2")


@scenario
def gradients_of_40000_in_fp16() -> dict[str, Any]:
    """Two ranks with gradients of 40 000 sum to more than fp16 holds; divided before, they do not."""
    means = {}
    for factor in (1.0, 32.0):
        model = DistributedDataParallel(nn.Linear(1, 4, bias=False).half())
        predivide.tell_ddp(model, predivide.Predivide(factor, 2))
        model(torch.full((1, 1), 40000.0).half()).sum().backward()
        means[str(factor)] = model.module.weight.grad[0].item()
    return means


@scenario
def summands_of_4000_in_fp16_shards() -> dict[str, Any]:
    """32 gradients of 4000, two real ones and 30 that repeat them, reduced in fp16 by ``fully_shard``."""
    mesh = init_device_mesh("cpu", (2,))
    reduce_scatter = dist.reduce_scatter_tensor
    contributions: list[tuple[str, float]] = []

    def as_of_32(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
        contributions.append((str(input.dtype), input.max().item()))
        work = reduce_scatter(output, input, **options)
        pair = output.clone()
        for _ in range(15):  # as a ring of ranks adds: in the dtype of the gradients
            output += pair
        return work

    means = {}
    dist.reduce_scatter_tensor = as_of_32  # type: ignore[assignment]
    try:
        for factor in (1.0, 32.0):
            model = nn.Linear(1, 4, bias=False)
            fully_shard(model, mesh=mesh, mp_policy=POLICIES["16-true"])
            predivide._tell_fsdp2(model, predivide.Predivide(factor, 32))
            model(torch.full((1, 1), 4000.0).half()).sum().backward()
            means[str(factor)] = model.weight.grad.full_tensor()[0].item()  # type: ignore[union-attr]
    finally:
        dist.reduce_scatter_tensor = reduce_scatter
    return {"means": means, "contributions": contributions}


def note_norm(gpt: nn.Module, seen: set[tuple[str, str]]) -> None:
    """Of a block's norm: the dtype in which its gain is used, and the rounding of what it gives on."""

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        seen.add((str(module.weight.dtype), str(output.dtype)))

    gpt.blocks[0].mlp_norm.register_forward_hook(note)  # type: ignore[index, union-attr]


class NoteNorm(Callback):
    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        note_norm(pl_module.gpt, self.seen)


@scenario
def norms_in_bf16_mixed() -> dict[str, Any]:
    """Under FSDP2, and under FSDP1 as torch has it on a CPU, where Lightning refuses it."""
    note = NoteNorm()
    fit2("fsdp2", steps=1, n_layer=1, precision="bf16-mixed", callbacks=(note,), validates=False)
    strategy, seen = FSDP1OnCPU(precision_plugin=FSDPPrecision("bf16-mixed")), set()
    gpt = GPT(tiny_module(n_layer=1).config)
    note_norm(gpt, seen)
    sharded = strategy._setup_model(gpt)
    sharded(torch.zeros(1, 4, dtype=torch.long)).float().sum().backward()
    return {"fsdp2": sorted(note.seen), "fsdp": sorted(seen), "stored": str(next(sharded.parameters()).dtype)}


if __name__ == "__main__":
    main()
