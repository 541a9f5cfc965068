"""From what a recipe says about strategy, precision, mesh and loss scale to the arguments of Lightning's Trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision, Precision

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.strategies.fsdp2 import FSDP2Strategy
from lit_stable.strategies.fsdp2_precision import FSDP2Precision
from lit_stable.strategies.loss_scale import DEFAULT, LossScale, LossScaler
from lit_stable.strategies.mesh import ONE_COPY, MeshOptions
from lit_stable.strategies.precisions import FP16, full_name, precision_problem


def select(options: Mapping[str, Any], mesh: MeshOptions = ONE_COPY, loss_scale: LossScale = DEFAULT) -> dict[str, Any]:
    """The Trainer's options with strategy and precision as objects where their names do not say all.

    fp16 becomes a plugin: by name Lightning would replace it by bf16 on a CPU, and has no place for a loss scale.

    Args:
        options: Of the Trainer; ``strategy``, ``precision`` and ``accelerator`` as in a recipe.
        mesh: The layout of the ranks.
        loss_scale: The policy of the loss scale, with fp16.

    Raises:
        MisconfigurationException: when the strategy does not train in the precision, or does not read the mesh.
    """
    strategy, precision = options["strategy"], full_name(options["precision"])
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    problem = precision_problem(name, options["precision"])
    if problems := [*([problem] if problem else []), *mesh_problems(name, mesh)]:
        raise MisconfigurationException("\n".join(problems))
    chosen = {**options, "precision": precision}
    if not mesh.is_plain:
        chosen["strategy"] = FSDP2Strategy(strategy != "fsdp2_full", **dataclasses.asdict(mesh))
    if precision in FP16:
        given = options.get("plugins") or []
        fp16 = _fp16(name, precision, options["accelerator"], loss_scale)
        chosen.update(precision=None, plugins=[*(given if isinstance(given, list) else [given]), fp16])
    return chosen


def mesh_problems(strategy: str, mesh: MeshOptions) -> list[str]:
    """Mesh options that a strategy, by its name or that of its class, would not look at."""
    if mesh.is_plain or strategy in ("fsdp2", "fsdp2_full"):
        return []
    remedy = "give them to the class" if strategy == "FSDP2Strategy" else "set trainer.strategy to fsdp2 or fsdp2_full"
    defaults = dataclasses.asdict(ONE_COPY)
    return [
        f"mesh.{name}={value}: strategy {strategy} does not read it; {remedy}."
        for name, value in dataclasses.asdict(mesh).items()
        if value != defaults[name]
    ]


def _fp16(strategy: str, precision: str, accelerator: str, policy: LossScale) -> Precision:
    on_cuda = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    device = "cuda" if on_cuda else "cpu"
    if strategy.lower().startswith("fsdp2"):
        return FSDP2Precision(precision, LossScaler(policy, device, over_ranks=True), device)
    if strategy.lower().startswith("fsdp"):
        plugin = FSDPPrecision("16-mixed")  # its constructor refuses any scaler
        plugin.scaler = LossScaler(policy, device, over_ranks=True)  # type: ignore[assignment]
        return plugin
    return MixedPrecision("16-mixed", device, LossScaler(policy, device))
