"""Turn torch's Adam or AdamW into the 8-bit one, in place, or say why not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from .base import MisconfigurationException
from .eight_bit_blocks import refuse_unplaceable
from .eight_bit_layout import TensorPlan
from .eight_bit_optimizer import BlockwiseAdam, BlockwiseAdamW, StatePlan, is_blockwise, refuse_options
from .private_optimizer_names import pinned_step, swap_class
from .shards import local

KINDS: dict[type[Optimizer], type[Optimizer]] = {Adam: BlockwiseAdam, AdamW: BlockwiseAdamW}


def convertible(optimizer: Any) -> bool:
    """Whether it is torch's Adam or AdamW, or one that an earlier fit converted; a subclass may override the step."""
    return type(optimizer) in KINDS or is_blockwise(optimizer)


@torch.no_grad()
def convert_in_place(optimizer: Any, plan: StatePlan, device: torch.device) -> None:
    """Turn an Adam or AdamW into its counterpart here: the same object with the same groups, hooks and scheduler.

    An optimizer that an earlier fit has converted keeps its moments and follows the new plan.

    Raises:
        MisconfigurationException: when it has an option, or a parameter, that cannot be stepped on here.
    """
    for group in optimizer.param_groups:
        refuse_options(group)
        for parameter in group["params"]:
            _refuse_parameter(parameter, plan.tensors.get(parameter), device)
    if pinned_step(optimizer) == "other":
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}.step`: something has replaced it on the instance, so `EightBitAdam` would"
            " never be called; use step hooks (register_step_pre_hook) instead."
        )
    if not is_blockwise(optimizer):
        swap_class(optimizer, KINDS[type(optimizer)])
    optimizer.take_over(plan)


def _refuse_parameter(parameter: Tensor, planned: TensorPlan | None, device: torch.device) -> None:
    name = "a parameter of no module" if planned is None else planned.name
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise MisconfigurationException(
            f"`EightBitAdam`: {name} is {parameter.dtype}; it steps on float32, bfloat16 and float16."
        )
    if local(parameter).device.type != device.type:
        raise MisconfigurationException(
            f"`EightBitAdam`: {name} lies on {local(parameter).device.type} while the run is on {device.type}; it keeps"
            " its states beside the parameters and does not offload them: turn CPU offload off."
        )
    if planned is not None and planned.bits == 8:
        refuse_unplaceable(name, parameter)
