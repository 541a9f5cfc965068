"""The one gradient norm of a step: global, in fp32, each parameter once, the same on every rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .base import StabilityCallback, find_or_install, is_logging_step
from .private_fsdp_names import fsdp1_shards
from .private_optimizer_names import loss_scale, unscales_in_step
from .progress import Progress
from .shards import OverShards, fsdp1_model, shard_groups, summed_piece
from .step_hooks import refuse_engine

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
        key = (shard_group,) if parameter in shards else shard_groups(parameter)
        local = pieces[key]
        if parameter.grad is not None:
            local.append(summed_piece(parameter.grad))
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


def tensor_norms(parameters: Sequence[nn.Parameter], over_shards: OverShards, norm_type: NormType = "l2") -> Tensor:
    """Norm of each gradient by itself, whole on every rank.

    Args:
        parameters: Those whose ``.grad`` counts; a gradient of ``None`` has norm 0.
        over_shards: Made from the same parameters.
        norm_type: As of :func:`global_grad_norm`.

    Returns:
        (n,), fp32, on the device of the first parameter, equal on all ranks. Non-finite where the gradient is.
    """
    device = parameters[0].device
    pieces = {i: summed_piece(p.grad) for i, p in enumerate(parameters) if p.grad is not None}
    filled = {i: t for i, t in pieces.items() if t.numel()}  # an empty shard has no largest element
    order = math.inf if norm_type == "inf" else 2.0
    measured = torch._foreach_norm(list(filled.values()), order, torch.float32) if filled else ()
    found = dict(zip(filled, measured, strict=True))
    nothing = torch.zeros((), device=device)
    norms = torch.stack([found[i].to(device) if i in found else nothing for i in range(len(parameters))])
    if norm_type == "inf":
        return over_shards.largest(torch.where(norms.isnan(), math.inf, norms))
    return over_shards.sum(norms.square()).sqrt()


class GradNorm(StabilityCallback):
    """Take the gradient norm once per optimizer step, before anything clips or skips, and share it.

    Other callbacks call ``GradNorm.of(trainer).value`` in ``on_before_optimizer_step``; it installs itself.

    Logged: ``stability/grad_norm`` (L2 over all parameters of the optimizer, before clipping, at logging steps; of
    several optimizers that of the one that stepped last).

    Attributes:
        value: 0-d fp32 tensor on the device, the same on all ranks; ``None`` before the first step.

    Example::

        >>> Trainer(callbacks=[GradNorm()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 30

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._fsdp1: nn.Module | None = None
        self._scale: Tensor | None = None  # by which the gradients of this step are still multiplied
        self._over_shards: dict[int, OverShards] = {}  # by the identity of the optimizer
        self._each: dict[tuple[int, NormType], Tensor] = {}  # likewise

    @staticmethod
    def of(trainer: Trainer) -> GradNorm:
        """The trainer's norm callback, installed if it has none yet."""
        refuse_engine(trainer, "GradNorm")
        return find_or_install(trainer, GradNorm)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_engine(trainer, "GradNorm")
            if not pl_module.automatic_optimization:
                Progress.of(trainer)  # it notices steps that this callback would not hear of

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fsdp1 = fsdp1_model(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._scale = loss_scale(trainer) if unscales_in_step(optimizer) else None
        self._each = {}
        self.value = self.measure(optimizer)
        if is_logging_step(trainer):
            pl_module.log("stability/grad_norm", self.value)

    def measure(self, optimizer: Any, norm_type: NormType = "l2") -> Tensor:
        """The norm of an optimizer's gradients as they are now, without the loss scale, under whatever strategy."""
        with torch.no_grad():
            norm = global_grad_norm(_parameters(optimizer), self._fsdp1, norm_type)
        return norm if self._scale is None else norm / self._scale

    def measure_each(self, optimizer: Any, norm_type: NormType = "l2") -> Tensor:
        """Norm of each gradient by itself, (n,) in the order of the optimizer's groups, without the loss scale.

        Taken once per step however many ask, by the first: clipping by parts changes the gradients.
        """
        key = id(optimizer), norm_type
        if key not in self._each:
            parameters = _parameters(optimizer)
            if id(optimizer) not in self._over_shards:
                self._over_shards[id(optimizer)] = OverShards(parameters, self._fsdp1)
            with torch.no_grad():
                norms = tensor_norms(parameters, self._over_shards[id(optimizer)], norm_type)
            self._each[key] = norms if self._scale is None else norms / self._scale
        return self._each[key]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.value = self._fsdp1 = self._scale = None
        self._over_shards, self._each = {}, {}


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
