"""The first lines of a run: what one asks first when a run behaves oddly."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.distributed.fsdp import FullyShardedDataParallel

from lit_stable import __version__
from lit_stable.callbacks import Progress
from lit_stable.callbacks.base import MisconfigurationException, StabilityCallback
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.description import describe_data
from lit_stable.model.init import audit_init, format_audit
from lit_stable.model.kernel_report import describe_attention
from lit_stable.model.recompute import Recompute
from lit_stable.module import GPTModule
from lit_stable.optim.groups import audit
from lit_stable.optim.schedule import format_lr
from lit_stable.run.session import Session
from lit_stable.strategies.launcher import describe_launcher
from lit_stable.strategies.mesh import ONE_COPY, describe_mesh


def first_lines(trainer: Trainer, module: GPTModule, callbacks: list[Callback]) -> list[str]:
    """Hardware, precision, model, groups, schedule and features: what one asks first when a run behaves oddly."""
    assert module.gpt is not None
    progress, data = Progress.of(trainer), trainer.datamodule  # type: ignore[attr-defined]
    device = trainer.strategy.root_device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    schedule = ", ".join(f"{p:,} {format_lr(lr)} ({label})" for p, lr, label in module.schedule.milestones())
    session = session_of(trainer)
    return [
        f"lit-stable {__version__}, torch {torch.__version__}",
        f"hardware: {trainer.world_size} x {hardware}; started by {describe_launcher()};"
        f" strategy {type(trainer.strategy).__name__}{layout(trainer)}; precision {trainer.precision}",
        *loss_scale_policy(trainer),
        f"model: {sum(module.parameter_parts(module).values()):,} parameters; {module.describe()}",
        f"attention: {attention(trainer, module)}",
        f"compiled: {module.compiled}; activations {_kept(module.recompute)}",
        f"dtypes: {dtypes(trainer, module)}",
        f"learning rate by {module.schedule.describe_units()}: {schedule}",
        audit(trainer.optimizers[0].param_groups, module),
        *(describe_data(data) if isinstance(data, TokenDataModule) else []),
        "callbacks: " + "; ".join(map(describe, callbacks)),
        f"run folder: {session.folder if session is not None else None}",
        f"position: step {progress.steps}, {progress.samples:,} samples, {progress.tokens:,} tokens"
        + (f"; dropped sample ranges {progress.dropped}" if progress.dropped else ""),
    ]


def layout(trainer: Trainer) -> str:
    """How the ranks are laid out, where the strategy has a mesh, and what was asked for about resharding."""
    mesh = trainer.lightning_module.device_mesh
    if mesh is None:
        return ""
    reshards = getattr(trainer.strategy, "layout", ONE_COPY).reshard_after_forward
    asked = "" if reshards is None else f"; reshard_after_forward={reshards}"
    return f" ({describe_mesh(mesh)}{asked})"


def attention(trainer: Trainer, module: GPTModule) -> str:
    """The kernel that attention runs on, under this run's precision and at its sequence length."""
    assert module.gpt is not None
    policy = getattr(trainer.precision_plugin, "policy", None)
    dtype = next(module.gpt.parameters()).dtype if policy is None or policy.param_dtype is None else policy.param_dtype
    length = getattr(trainer.datamodule, "sequence_length", module.config.max_length)  # type: ignore[attr-defined]
    with trainer.precision_plugin.forward_context():
        return describe_attention(module.gpt, length, dtype, trainer.strategy.root_device)


def dtypes(trainer: Trainer, module: GPTModule) -> str:
    """Dtypes of parameters, optimizer moments and buffers, with how many tensors have each."""
    moments = [
        value
        for state in trainer.optimizers[0].state.values()
        for name, value in state.items()
        if name != "step" and torch.is_tensor(value)
    ]
    kinds = {"parameters": module.parameters(), "moments": moments, "buffers": module.buffers()}
    counted = {kind: Counter(str(t.dtype).removeprefix("torch.") for t in tensors) for kind, tensors in kinds.items()}
    return ", ".join(f"{kind} {dict(counts) or 'none'}" for kind, counts in counted.items())


def _kept(recompute: Recompute) -> str:
    if recompute == "selective":
        return "recomputed block by block, but for attention and half of the products"
    return "recomputed block by block" if recompute else "kept"


def loss_scale_policy(trainer: Trainer) -> list[str]:
    """A line, where gradients are scaled by a policy of ours."""
    policy = getattr(getattr(trainer.precision_plugin, "scaler", None), "policy", None)
    return [] if policy is None else [f"loss scale: {describe(policy)}"]


def describe(thing: Any, defaults: bool = False) -> str:
    """A callback, or an option of one that is a dataclass, as its class and the settings that are not the defaults.

    Args:
        thing: The callback.
        defaults: Tell its own default settings too; what a dataclass among them leaves at its defaults goes untold.
    """
    plain = _by_default(type(thing))
    settings = []
    for name, parameter in inspect.signature(type(thing).__init__).parameters.items():
        if name == "self" or not hasattr(thing, name):
            continue
        default = parameter.default if plain is None else getattr(plain, name, parameter.default)
        if repr(value := getattr(thing, name)) != repr(default) or defaults:
            settings.append(f"{name}={_brief(value)}")
    return f"{type(thing).__name__}({', '.join(settings)})"


def _by_default(kind: type) -> Any:
    """One of ours without a setting, since what it makes of them is told, as None of its standard ladder."""
    if not issubclass(kind, StabilityCallback):
        return None
    try:
        return kind()
    except (TypeError, MisconfigurationException):  # one must be given
        return None


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_brief, value))}]"
    return describe(value) if is_dataclass(value) else repr(value)


def measured_init(module: GPTModule) -> str:
    """The initial weights measured against what the recipe declares; every tensor that is off, if any is."""
    assert module.gpt is not None
    if module.begun_with is not None:
        return f"initial weights: those of {module.begun_with}"
    rows = audit_init(((name, _whole(p)) for name, p in module.gpt.named_parameters()), module.config)
    wrong = sum(not row.ok for row in rows)
    line = f"initial weights: {len(rows)} tensors measured, {wrong} not as declared"
    return f"{line}\n{format_audit(rows)}" if wrong else line


def whole_parameters(trainer: Trainer) -> AbstractContextManager[None]:
    """Under FSDP1, whose parameters are nameless pieces, gather them for the time being; all ranks take part."""
    model = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        gathered: AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(model, writeback=False)
        return gathered
    return nullcontext()


def session_of(trainer: Trainer) -> Session | None:
    """The trainer's session, if the command line made one."""
    return next((c for c in trainer.callbacks if isinstance(c, Session)), None)  # type: ignore[attr-defined]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
