"""The one gradient norm of a step: global, in fp32, each parameter once, the same on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .base import StabilityCallback, install, is_logging_step
from .private_names import fsdp1_shards

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def global_grad_norm(parameters: Iterable[nn.Parameter], model: nn.Module | None = None) -> Tensor:
    """L2 norm of all gradients together, accumulated in fp32.

    Right for plain tensors (one device, DDP: gradients are already averaged), DTensors (FSDP2, tensor parallel,
    hybrid), FSDP1 shards, and mixes of them. Squares are summed over the ranks that hold different pieces and over no
    others, so every parameter counts once. Ranks without any gradient take part in the sums.

    Args:
        parameters: Those whose ``.grad`` counts; a gradient of ``None`` counts as zero.
        model: The model that FSDP1 wraps, if it does: its shards look like plain parameters.

    Returns:
        A 0-d fp32 tensor on the parameters' device, equal on all ranks. Non-finite if any gradient is.
    """
    parameters = list(parameters)
    if not parameters:
        return torch.zeros(())
    device = parameters[0].device
    shards, shard_group = fsdp1_shards(model) if model is not None else (set[nn.Parameter](), None)

    # Pieces by the process groups over which their squares must be summed; () = complete on this rank.
    pieces: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        # The key is made from the parameter, which every rank has, not from the gradient, which one may lack.
        key = (shard_group,) if parameter in shards else _sharded_over(parameter)
        local = pieces[key]
        if parameter.grad is not None:
            local.append(_local(parameter.grad))

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


def _sharded_over(parameter: Tensor) -> tuple[Any, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(parameter.placements) if p.is_shard() and mesh.size(i) > 1)


def _local(grad: Tensor) -> Tensor:
    if not isinstance(grad, DTensor):
        return grad
    if any(p.is_partial() for p in grad.placements):  # sums still owed between ranks
        from torch.distributed.tensor import Replicate

        grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
    return grad.to_local()


def _has_fsdp1(model: Any) -> bool:
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
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradNorm):
                return callback
        norm = GradNorm()
        install(trainer, norm)
        return norm

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        self._fsdp1 = model if _has_fsdp1(model) else None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        with torch.no_grad():
            self.value = global_grad_norm(parameters, self._fsdp1)
        if is_logging_step(trainer):
            pl_module.log("stability/grad_norm", self.value)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.value = self._fsdp1 = None
