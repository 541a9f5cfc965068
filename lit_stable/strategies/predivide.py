"""Divide gradients before ranks add them up: a sum in fp16 that would overflow does not.

The mean over N ranks is (sum of g / p) * p / N for any p. Sums in fp16 end at 65504; with p = 1 it takes 17 ranks with
gradients of 4000 to get there. Both torch wrappers have a choice of their own (DDP p = N, FSDP2 about sqrt(N) in fp16);
OPT trained with p = 32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.strategies.mesh import SHARD


class Predivide:
    """The two halves of a mean over ranks.

    Args:
        factor: p above, > 0.
        ranks: N above.
    """

    def __init__(self, factor: float, ranks: int) -> None:
        self.factor = factor
        self.rest = ranks / factor

    def before(self, gradient: torch.Tensor) -> torch.Tensor:
        """In place, what a rank contributes."""
        return gradient.div_(self.factor)

    def after(self, total: torch.Tensor) -> torch.Tensor:
        """In place, the mean of the sum of contributions."""
        return total.div_(self.rest)


def refuse_factor(factor: float | None) -> None:
    """Raise ValueError when a pre-divide factor is no finite number above 0 and not None either."""
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"model.gradient_predivide={factor}: must be a finite number > 0, or null.")


def predivide_gradients(strategy: Strategy, factor: float, ranks: int) -> bool:
    """Have the model of a strategy, wrapped and not yet trained, reduce gradients over ``ranks`` by this mean.

    Returns:
        Whether anything is reduced at all: not on one rank.

    Raises:
        MisconfigurationException: under a strategy that cannot be told, a torch that is too old, or when the ranks hold
            a whole copy each under ``fsdp2``.
    """
    if ranks == 1 or isinstance(strategy, SingleDeviceStrategy):
        return False
    mean = Predivide(factor, ranks)
    if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel):
        tell_ddp(strategy.model, mean)
    elif isinstance(strategy, ModelParallelStrategy) and strategy.model is not None:
        if _whole_copies(strategy):
            raise MisconfigurationException(
                f"model.gradient_predivide={factor}: with mesh.replicate={ranks} each rank is a copy, and fully_shard"
                " divides nothing before it adds those up; take strategy ddp."
            )
        _tell_fsdp2(strategy.model, mean)
    else:
        raise MisconfigurationException(
            f"model.gradient_predivide={factor}: {type(strategy).__name__} cannot be told how to reduce gradients; take"
            " strategy ddp or fsdp2."
        )
    return True


def _whole_copies(strategy: ModelParallelStrategy) -> bool:
    names = strategy.device_mesh.mesh_dim_names or ()
    return SHARD in names and strategy.device_mesh[SHARD].size() == 1


def tell_ddp(model: DistributedDataParallel, mean: Predivide) -> None:
    """Reduce each bucket of gradients by ``mean``."""

    def reduce(bucket: Any) -> Any:
        work: Any = dist.all_reduce(mean.before(bucket.buffer()), async_op=True)
        return work.get_future().then(lambda future: mean.after(future.value()[0]))

    # A lambda, because DDP compares the annotations of a hook with classes, and ours are text.
    model.register_comm_hook(None, lambda state, bucket: reduce(bucket))


def _tell_fsdp2(model: nn.Module, mean: Predivide) -> None:
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not all(hasattr(unit, "set_custom_reduce_scatter") for unit in units):
        raise MisconfigurationException(
            f"model.gradient_predivide={mean.factor}: fully_shard of torch {torch.__version__} takes no other"
            " reduction; take a newer torch (2.13 will do), or strategy ddp."
        )
    for unit in units:
        unit.set_custom_reduce_scatter(_PredividedReduceScatter(mean))
        # Sums, which all that gloo knows are, and no division of its own: in fp16 it would put a part of the rest
        # before the sum as well. The hook comes behind the sum over the copies, where there are any.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        unit.set_all_reduce_hook(mean.after)


class _PredividedReduceScatter:
    """What `fully_shard` calls in place of its own reduce-scatter."""

    def __init__(self, mean: Predivide) -> None:
        self.mean = mean

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.mean.before(input_tensor)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
