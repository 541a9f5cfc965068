"""`lit-stable check`: what a recipe would do, without training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from torch import nn

from lit_stable.callbacks import BatchSizeWarmup, EightBitAdam, LayerNormFreeze
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.cadence import Every
from lit_stable.callbacks.eight_bit_layout import TensorPlan, plan_states, state_table
from lit_stable.cli.check_batches import batches
from lit_stable.cli.check_checkpoints import cadences, retention
from lit_stable.cli.check_data import reading
from lit_stable.cli.published import NOTHING_PUBLISHED, Published
from lit_stable.cli.trace import Trace
from lit_stable.cli.turning_points import turning_points
from lit_stable.data.batch_sizes import batch_size_problems
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.model.memory import memory_per_device
from lit_stable.model.sharding import reshards_after_forward
from lit_stable.module import GPTModule
from lit_stable.optim.build import optimizer_groups
from lit_stable.optim.groups import audit
from lit_stable.optim.schedule import format_lr
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.console import human_bytes, human_count
from lit_stable.run.start import describe
from lit_stable.strategies.mesh import ONE_COPY, MeshOptions
from lit_stable.strategies.precisions import full_name


def check(
    module: GPTModule,
    data: TokenDataModule,
    trainer: Mapping[str, Any],
    features: Mapping[str, Callback],
    devices: int,
    mesh: MeshOptions = ONE_COPY,
    published: Published = NOTHING_PUBLISHED,
    trace: Trace | None = None,
    checkpoints: Checkpoints | None = None,
    validate_every: Every = 500,
) -> str:
    """A page about the resolved recipe on ``devices`` devices.

    Args:
        module: The model and its schedule; nothing of it is built on a device.
        data: The data; what lies on disk is opened.
        trainer: The Trainer's options.
        features: The active features by name.
        devices: How many devices to plan for.
        mesh: How they are laid out.
        published: What is published of the model.
        trace: Of the run; None where it has no end.
        checkpoints: When to save, and what is kept.
        validate_every: How often to validate.

    Raises:
        MisconfigurationException: with every problem that only shows when parts meet.
    """
    mesh = getattr(trainer["strategy"], "layout", mesh)  # of one given as a class
    ranks = devices // mesh.tensor_parallel  # those that see different samples
    problems = mesh.problems(devices) or meeting_problems(module, data, features, ranks)
    if problems:
        raise MisconfigurationException("\n".join(problems))
    outline = _outline(module, features)
    plans, checkpoints = _plans(outline, features), checkpoints or Checkpoints()
    sections = [
        "\n".join(filter(None, [_model(module, outline), published.line(module.config)])),
        _groups(module, outline),
        batches(module, data, features, ranks, trainer["max_steps"]),
        reading(data, features, trainer["max_steps"]),
        *_states(plans),
        _memory_line(_memory_parts(module, outline, plans, data, trainer, devices, mesh)),
        "\n".join(
            [
                cadences(validate_every, checkpoints, trace),
                _checkpoints(module, outline, features, checkpoints, trainer, plans),
            ]
        ),
        _schedule(module),
        *([turning_points(trace)] if trace else []),
        "features: " + ("; ".join(describe(f, defaults=True) for f in features.values()) or "none"),
    ]
    return "\n\n".join(sections)


def meeting_problems(
    module: GPTModule, data: TokenDataModule, features: Mapping[str, Callback], ranks: int
) -> list[str]:
    """Problems between model, data on disk, features and data-parallel ranks; each part alone has checked itself."""
    problems = batch_size_problems(data.micro_batch, data.global_batch, ranks)
    problems += [p for f in features.values() if isinstance(f, BatchSizeWarmup) for p in f.stage_problems(ranks)]
    unreadable = data.path_problems()
    problems += unreadable
    if not (unreadable or data.needs_preparation):
        try:
            data.setup("fit")
        except ValueError as error:
            problems.append(str(error))
    problems += data.model_problems(module.config.vocab_size, module.config.max_length)
    return problems + module.meeting_problems(data)


def _outline(module: GPTModule, features: Mapping[str, Callback]) -> nn.Module:
    with torch.device("meta"):
        outline = module.outline()
    _freeze(outline, features)
    return outline


def _freeze(outline: nn.Module, features: Mapping[str, Callback]) -> None:
    """Take the gradients from what a fit freezes for good."""
    parameters = dict(outline.named_parameters())
    for feature in features.values():
        if isinstance(feature, LayerNormFreeze) and feature.action == "act":
            for name in feature.frozen_for_good(outline):
                parameters[name].requires_grad_(False)


def _model(module: GPTModule, outline: nn.Module) -> str:
    built = _count(outline)
    parts = ", ".join(f"{name} {human_count(n)}" for name, n in module.parameter_parts(outline).items() if n)
    return f"model: {module.describe()}\nparameters: {built:,} ({parts})"


def _count(outline: nn.Module, trainable_only: bool = False) -> int:
    return sum(p.numel() for p in outline.parameters() if p.requires_grad or not trainable_only)


def _groups(module: GPTModule, outline: nn.Module) -> str:
    network = module.optimized(outline)
    return audit(optimizer_groups(network, module.optimizer_options), network)


def _plans(outline: nn.Module, features: Mapping[str, Callback]) -> list[TensorPlan] | None:
    """How each tensor's moments are kept, where a feature keeps any in 8 bit; by the names that a fit has."""
    feature = next((f for f in features.values() if isinstance(f, EightBitAdam)), None)
    if feature is None:
        return None
    return list(plan_states(outline, feature.rules).values())


def _states(plans: list[TensorPlan] | None) -> list[str]:
    return [] if plans is None else [state_table(plans)]


def memory_parts(
    module: GPTModule,
    data: TokenDataModule,
    trainer: Mapping[str, Any],
    features: Mapping[str, Callback],
    devices: int,
    mesh: MeshOptions = ONE_COPY,
) -> dict[str, float]:
    """Bytes on one of ``devices`` by what they hold, see `memory_per_device`. Arguments as for `check`."""
    outline = _outline(module, features)
    return _memory_parts(module, outline, _plans(outline, features), data, trainer, devices, mesh)


def _memory_parts(
    module: GPTModule,
    outline: nn.Module,
    plans: list[TensorPlan] | None,
    data: TokenDataModule,
    trainer: Mapping[str, Any],
    devices: int,
    mesh: MeshOptions,
) -> dict[str, float]:
    precision, strategy = full_name(trainer["precision"]), trainer["strategy"]
    stored, width = 2 if precision == "bf16-true" else 4, 4 if precision == "32-true" else 2
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    shards = devices // mesh.replicate if name.lower().startswith("fsdp") else 1
    return memory_per_device(
        module.config,
        micro_batch=data.micro_batch,
        length=data.sequence_length,
        shards=shards,
        tensor_parallel=mesh.tensor_parallel,
        width=width,
        stored=stored,
        recompute=module.recompute,
        weight_bytes=stored * _count(outline),
        gradient_bytes=stored * _count(outline, trainable_only=True),
        state_bytes=_state_bytes(module, outline, plans, stored),
        compiled=module.compile_option != "off",
        copies=_copied_weights(module, name.lower(), precision, shards, mesh, width * _count(outline)),
        accumulates=data.global_batch > data.micro_batch * (devices // mesh.tensor_parallel),
        head_makes_losses=module.head_makes_losses,
    )


def _memory_line(parts: Mapping[str, float]) -> str:
    listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size)
    return f"memory per device, estimated: {human_bytes(sum(parts.values()))} ({listed})"


def _copied_weights(
    module: GPTModule, strategy: str, precision: str, shards: int, mesh: MeshOptions, gathered_bytes: int
) -> Literal["none", "some", "all"]:
    """``copies`` of `memory_per_device`: weights that autocast has rounded or that FSDP has gathered.

    Args:
        gathered_bytes: Of all weights in the dtype of computation, over all tensor-parallel ranks.
    """
    if not strategy.startswith("fsdp") or (shards == 1 and not strategy.startswith("fsdp2")):
        return "all" if precision in ("bf16-mixed", "16-mixed") and not module.recompute else "none"
    reshards = mesh.reshard_after_forward
    if reshards is None:
        reshards = reshards_after_forward(gathered_bytes / mesh.tensor_parallel)
    return "some" if reshards or not strategy.startswith("fsdp2") else "all"


def _checkpoints(
    module: GPTModule,
    outline: nn.Module,
    features: Mapping[str, Callback],
    checkpoints: Checkpoints,
    trainer: Mapping[str, Any],
    plans: list[TensorPlan] | None,
) -> str:
    stored = 2 if full_name(trainer["precision"]) == "bf16-true" else 4
    size = stored * _count(outline) + _state_bytes(module, outline, plans, stored)
    return retention(checkpoints, module.schedule, features.values(), trainer["max_steps"], size)


def _state_bytes(module: GPTModule, outline: nn.Module, plans: list[TensorPlan] | None, stored: int) -> int:
    if plans is not None:
        return sum(plan.num_bytes for plan in plans)
    return module.optimizer_options.moments * stored * _count(outline, trainable_only=True)


def _schedule(module: GPTModule) -> str:
    schedule = module.schedule
    points = [f"  {p:>16,}  {format_lr(lr):>12}  {label}" for p, lr, label in schedule.milestones()]
    return f"learning rate ({schedule.shape}) by {schedule.describe_units()}:\n" + "\n".join(points)
