"""Which ranks hold the pieces of a parameter, and one number per parameter combined over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .private_fsdp_names import fsdp1_shards

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def shard_groups(parameter: Tensor) -> tuple[Any, ...]:
    """The process groups over which a DTensor is split; none for what is whole on every rank."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    # Not `is_shard()`: FSDP2 over tensor parallelism places strided shards, which say they are none.
    split = [not p.is_replicate() and not p.is_partial() for p in parameter.placements]
    return tuple(mesh.get_group(i) for i, is_split in enumerate(split) if is_split and mesh.size(i) > 1)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a tensor, in the same memory."""
    piece: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return piece


def summed_piece(gradient: Tensor) -> Tensor:
    """This rank's piece of a gradient to be measured, with the sums that ranks still owe each other; maybe a copy."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()  # of an embedding: rows that occur twice are added up
    if gradient.dtype == torch.float64:
        gradient = gradient.float()  # torch refuses to narrow within a norm
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        gradient = gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])
    return local(gradient)


def has_fsdp1(model: Any) -> bool:
    """Whether FSDP1 wraps the model or a part of it."""
    return isinstance(model, nn.Module) and any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())


def fsdp1_model(trainer: Trainer) -> nn.Module | None:
    """The trainer's model if FSDP1 wraps it: its shards look like plain parameters, and only its wrappers know."""
    model = trainer.strategy.model
    return model if has_fsdp1(model) else None


def has_flat_parameters(trainer: Trainer) -> bool:
    """Whether FSDP1 runs with ``use_orig_params=False``: the optimizer then holds flat mixtures of parameters."""
    return getattr(trainer.strategy, "kwargs", {}).get("use_orig_params") is False


class OverShards:
    """Combine one number per parameter over the ranks that hold its pieces: one collective per group of ranks.

    Each parameter counts once; the number of one that is whole on every rank is left as it is. The groups follow from
    the parameters, which every rank has, not from gradients, which one may lack, so all ranks take part alike.

    Args:
        parameters: In the order of the numbers.
        model: What FSDP1 wraps, if it does.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], model: nn.Module | None = None) -> None:
        shards, shard_group = fsdp1_shards(model) if model is not None else (set[nn.Parameter](), None)
        keys = [(shard_group,) if p in shards else shard_groups(p) for p in parameters]
        groups = dict.fromkeys(group for key in keys for group in key)  # in the same order on every rank
        members = {group: [i for i, key in enumerate(keys) if group in key] for group in groups}
        self._members = [(g, torch.tensor(m, device=parameters[0].device)) for g, m in members.items()]

    def sum(self, values: Tensor) -> Tensor:
        """Sums of (n,) values."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Largest of (n,) values, none of them NaN: a maximum over ranks may drop it."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, how: Any) -> Tensor:
        for group, members in self._members:
            picked = values[members]
            dist.all_reduce(picked, op=how, group=group)
            values = values.index_copy(0, members, picked)
        return values
