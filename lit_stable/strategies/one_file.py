"""Load a checkpoint file of one device or DDP into a sharded module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.parameter_order import Groups, names_by_group
from lit_stable.callbacks.safe_checkpoints import KEY


def load_one_file(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Give a sharded module and its optimizers the states of a checkpoint file; returns what else the file holds.

    One device and DDP number parameters by their place in the optimizer's groups, while Lightning's loader takes the
    numbers for places in the module: moments would land on other parameters, silently where shapes agree. Here each
    number becomes a name: the one that ``SafeCheckpoints`` recorded, or without it that of the parameter that stands at
    its place in the groups of today's optimizer.

    Args:
        path: The file.
        module: Sharded.
        optimizers: Of its parameters.
        strict: Whether the file must hold every tensor of the module, and no other.
        weights_only: Whether torch may unpickle no more than plain data; ``None``: as torch has it by default.

    Raises:
        CheckpointError: when the groups are not those that wrote the file.
    """
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    recorded: Sequence[Groups | None] = checkpoint.get(KEY, {}).get("parameters") or [None] * len(optimizers)
    saved = zip(optimizers, checkpoint.pop("optimizer_states"), recorded, strict=True)
    states = [  # before any is loaded
        (optimizer, _by_name(path, optimizer, state, names or names_by_group(optimizer, module)))
        for optimizer, state, names in saved
    ]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    set_model_state_dict(module, checkpoint.pop("state_dict"), options=options)
    for optimizer, state in states:
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state, options=options)
    return checkpoint


def _by_name(path: Path, optimizer: Optimizer, state: dict[str, Any], names: Groups | None) -> dict[str, Any]:
    assert names is not None, "today's optimizer holds this module's parameters"
    saved = [(group.get("name"), len(group["params"])) for group in state["param_groups"]]
    found = [(group.get("name"), len(group["params"])) for group in optimizer.param_groups]
    if saved != found:
        raise CheckpointError(
            f"{path}: its optimizer has the groups {saved} and today's has {found} (name, tensors); go on with the"
            " model and the optimizer that wrote it."
        )
    by_number = {
        number: name
        for group, own in zip(state["param_groups"], names, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    return {
        "state": {by_number[number]: values for number, values in state["state"].items()},
        "param_groups": [{**g, "params": [by_number[n] for n in g["params"]]} for g in state["param_groups"]],
    }
