"""A new run that begins with the weights of a checkpoint: no optimizer state, no position, nothing else of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lit_stable.callbacks.checkpoint_contents import CheckpointError, refuse_other_model, stored_shapes
from lit_stable.callbacks.checkpoint_files import damage
from lit_stable.model.gpt import GPT
from lit_stable.model.insertion import operations_between, out_of_sight
from lit_stable.model.same_model import model_changes
from lit_stable.weights.stored_model import read_record


def begin_with(module: nn.Module, gpt: GPT, path: Path, operations: Sequence[str] = ()) -> list[str]:
    """Fill a module, sharded or whole, with the weights of a checkpoint; all ranks call it.

    Args:
        module: With the names that the checkpoint has: a ``GPTModule``.
        gpt: The model in it.
        path: File, or folder of a sharded checkpoint.
        operations: Norms that the checkpoint may lack, which keep the weights that they have; ``activation`` where the
            checkpoint's may be another.

    Returns:
        A line for each option that is not the checkpoint's, and may be another.

    Raises:
        CheckpointError: when the checkpoint is damaged, or of another model.
    """
    if phrase := damage(path):
        raise CheckpointError(f"{phrase}; begin with another checkpoint.")
    stored = read_record(path).get("model", {})
    due = [what for what in operations_between(gpt.config, stored) if what in operations]
    problems, lines = model_changes(gpt.config, stored, due) if stored else ([], [])
    if problems:
        raise CheckpointError("\n".join(problems))
    with out_of_sight(gpt, [], due):
        refuse_other_model(path, stored_shapes(path, weights_only=True, needs_optimizer=False), module, strict=True)
        fill = _fill_from_folder if path.is_dir() else _fill_from_file
        fill(module, path)
    return lines


def _fill_from_folder(module: nn.Module, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load  # costs half a second to import

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process.*")
        # In place: each rank reads its own pieces.
        load({"state_dict": module.state_dict()}, checkpoint_id=str(path), no_dist=not dist.is_initialized())


def _fill_from_file(module: nn.Module, path: Path) -> None:
    state = torch.load(path, mmap=True, map_location="cpu", weights_only=True)["state_dict"]
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        module.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    set_model_state_dict(module, state, options=options)
