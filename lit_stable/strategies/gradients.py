"""What is left to do about gradients after the backward pass of a sharded module, once per optimizer step.

`fully_shard` reduces the gradients of the parameters that it shards over the data-parallel ranks, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_stable.callbacks.shards import local
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
    _average(whole, dist.group.WORLD)


def average_copied_gradients(optimizer: Optimizer) -> None:
    """Average the gradients of parameters that tensor-parallel ranks hold copies of, over those ranks.

    They are equal but for rounding: each group of data-parallel ranks has reduced them on its own.
    """
    copied = [p for group in optimizer.param_groups for p in group["params"] if _is_copied(p)]
    if not copied:
        return
    _average(copied, copied[0].device_mesh.get_group(TENSOR))


def _is_copied(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return TENSOR in names and parameter.placements[names.index(TENSOR)].is_replicate()


def _average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Give every parameter the mean of its gradients; it keeps None where no rank had one.

    A rank that did not use a parameter counts as zero, so that the collective has the same size everywhere, and steps
    on the mean as the others do: copies stay equal.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    pieces = [local(gradient) for gradient in gradients]
    flags = torch.ones(len(parameters), device=pieces[0].device)
    for index in (i for i, p in enumerate(parameters) if p.grad is None):
        flags[index].zero_()  # on the device: an assignment would wait for it
    flat = torch.cat([*(piece.reshape(-1).float() for piece in pieces), flags])
    dist.all_reduce(flat, group=group)
    flat.div_(dist.get_world_size(group))
    *means, anywhere = torch.split(flat, [*(piece.numel() for piece in pieces), len(parameters)])
    torch._foreach_copy_(pieces, [mean.view_as(piece) for piece, mean in zip(pieces, means, strict=True)])
    absent = [i for i, p in enumerate(parameters) if p.grad is None and p.requires_grad]
    if not absent:
        return
    # Who lacks one, and no other rank, waits for the device: an optimizer is told by the host what has a gradient.
    for index, is_used in zip(absent, anywhere[absent].tolist(), strict=True):
        if is_used:
            parameters[index].grad = gradients[index]
