"""What is left to do about gradients after the backward pass of a sharded module, once per optimizer step.

`fully_shard` reduces the gradients of the parameters that it shards over the data-parallel ranks, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_stable.strategies.mesh import TENSOR


def average_whole_gradients(optimizer: Optimizer) -> None:
    """Average the gradients of parameters that every rank holds whole, over all ranks, in one collective.

    Over the tensor-parallel ranks too. There they are equal already (or each a part of the sum, times the number of
    parts: see ``tensor_parallel.split_block``), but a collective of its own for each group of data-parallel ranks may
    round in another order, and the copies would drift apart.
    """
    whole = [p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, DTensor)]
    if not whole or dist.get_world_size() == 1:
        return
    # One that this rank did not use counts as zero: the collective has the same size everywhere.
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in whole]
    _average(gradients, dist.group.WORLD)


def average_copied_gradients(optimizer: Optimizer) -> None:
    """Average the gradients of parameters that tensor-parallel ranks hold copies of, over those ranks.

    They are equal but for rounding: each group of data-parallel ranks has reduced them on its own.
    """
    copied = [p for group in optimizer.param_groups for p in group["params"] if _is_copied(p)]
    if not copied:
        return
    gradients = [p.grad.to_local() if p.grad is not None else torch.zeros_like(p.to_local()) for p in copied]
    _average(gradients, copied[0].device_mesh.get_group(TENSOR))


def _is_copied(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return TENSOR in names and parameter.placements[names.index(TENSOR)].is_replicate()


def _average(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    flat = torch.cat([t.reshape(-1).float() for t in tensors])
    dist.all_reduce(flat, group=group)
    flat.div_(dist.get_world_size(group))
    pieces = torch.split(flat, [t.numel() for t in tensors])
    torch._foreach_copy_(list(tensors), [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)])
