"""The one gradient norm of a step: global, in fp32, each parameter once, the same on every rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from .base import StabilityCallback, find_or_install, is_logging_step
from .private_names import fsdp1_shards, loss_scale, unscales_in_step

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


NormType = Literal["l2", "inf"]


def global_grad_norm(
    parameters: Iterable[nn.Parameter], model: nn.Module | None = None, norm_type: NormType = "l2"
) -> Tensor:
    """Norm of all gradients together, accumulated in fp32.

    Right for plain tensors (one device, DDP: gradients are already averaged), DTensors (FSDP2, tensor parallel,
    hybrid), FSDP1 shards, and mixes of them. Squares are summed over the ranks that hold different pieces and over no
    others, so every parameter counts once. Ranks without any gradient take part in the sums.

    Args:
        parameters: Those whose ``.grad`` counts; a gradient of ``None`` counts as zero.
        model: The model that FSDP1 wraps, if it does: its shards look like plain parameters.
        norm_type: ``l2``: the root of the sum of squares; ``inf``: the largest absolute value.

    Returns:
        A 0-d fp32 tensor on the parameters' device, equal on all ranks. Non-finite if any gradient is.
    """
    parameters = list(parameters)
    if not parameters:
        return torch.zeros(())
    device = parameters[0].device
    shards, shard_group = fsdp1_shards(model) if model is not None else (set[nn.Parameter](), None)

    # Pieces by the process groups over which they must be combined; () = complete on this rank.
    pieces: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        # The key is made from the parameter, which every rank has, not from the gradient, which one may lack.
        key = (shard_group,) if parameter in shards else _sharded_over(parameter)
        local = pieces[key]
        if parameter.grad is not None:
            local.append(_local(parameter.grad))
    return _largest(pieces, device) if norm_type == "inf" else _root_of_squares(pieces, device)


def _root_of_squares(pieces: dict[tuple[Any, ...], list[Tensor]], device: torch.device) -> Tensor:
    total = torch.zeros((), device=device)
    for groups, tensors in pieces.items():
        squares = torch.zeros((), device=device)
        if tensors:
            norms = torch._foreach_norm(tensors, 2.0, torch.float32)
            squares = torch.stack([n.to(device) for n in norms]).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    return total.sqrt()


def _largest(pieces: dict[tuple[Any, ...], list[Tensor]], device: torch.device) -> Tensor:
    total = torch.zeros((), device=device)
    for groups, tensors in pieces.items():
        largest = torch.zeros((), device=device)
        filled = [t for t in tensors if t.numel()]  # a rank may hold an empty shard, which has no largest element
        if filled:
            norms = torch._foreach_norm(filled, math.inf, torch.float32)
            largest = torch.stack([n.to(device) for n in norms]).max()
        # A maximum over ranks may drop NaN, depending on which rank has it; infinity it keeps.
        largest = torch.where(largest.isnan(), math.inf, largest)
        for group in groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        total = torch.maximum(total, largest)
    return total


def _sharded_over(parameter: Tensor) -> tuple[Any, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    # Not `is_shard()`: FSDP2 over tensor parallelism places strided shards, which say they are none.
    split = [not p.is_replicate() and not p.is_partial() for p in parameter.placements]
    return tuple(mesh.get_group(i) for i, is_split in enumerate(split) if is_split and mesh.size(i) > 1)


def _local(grad: Tensor) -> Tensor:
    if not isinstance(grad, DTensor):
        return grad
    if any(p.is_partial() for p in grad.placements):  # sums still owed between ranks
        grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
    return grad.to_local()


def has_fsdp1(model: Any) -> bool:
    """Whether FSDP1 wraps the model or a part of it."""
    return isinstance(model, nn.Module) and any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())


class GradNorm(StabilityCallback):
    """Take the gradient norm once per optimizer step, before anything clips or skips, and share it.

    Other callbacks call ``GradNorm.of(trainer).value`` in ``on_before_optimizer_step``; it installs itself.

    Logged: ``stability/grad_norm`` (L2 over all parameters, before clipping, at logging steps).

    Attributes:
        value: 0-d fp32 tensor on the device, the same on all ranks; ``None`` before the first step.

    Example::

        >>> Trainer(callbacks=[GradNorm()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 30

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._fsdp1: nn.Module | None = None

    @staticmethod
    def of(trainer: Trainer) -> GradNorm:
        """The trainer's norm callback, installed if it has none yet."""
        return find_or_install(trainer, GradNorm)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        self._fsdp1 = model if has_fsdp1(model) else None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.value = self.measure(optimizer)
        scale = loss_scale(trainer)
        if scale is not None and unscales_in_step(optimizer):  # the gradients are still multiplied by it
            self.value = self.value / scale
        if is_logging_step(trainer):
            pl_module.log("stability/grad_norm", self.value)

    def measure(self, optimizer: Any, norm_type: NormType = "l2") -> Tensor:
        """The norm of an optimizer's gradients as they are now, under whatever strategy runs."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        with torch.no_grad():
            return global_grad_norm(parameters, self._fsdp1, norm_type)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.value = self._fsdp1 = None
