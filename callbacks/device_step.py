"""Skip or scale an optimizer step on the device, through what fused optimizers already read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import rank_zero_warn
from .progress import Progress

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# A fused torch optimizer reads two attributes at `step()`: `found_inf` (1.0: weights, moments and step count stay
# untouched, bit for bit, even if gradients are NaN) and `grad_scale` (gradients are divided by it in the kernel).
FOUND_INF, GRAD_SCALE = "found_inf", "grad_scale"
# A gradient scaler overwrites `found_inf` just before the step: what we asked for is kept under a name of our own.
KEPT = "stability_found_inf"


def is_fused(optimizer: Any) -> bool:
    """True if every group of the optimizer takes ``found_inf`` and ``grad_scale``."""
    return all(group.get("fused") for group in optimizer.param_groups)


def skip_step(trainer: Trainer, optimizer: Any, skip: Tensor) -> None:
    """Make this step change nothing if ``skip`` (0-d bool tensor, equal on all ranks), and count it.

    Fused optimizers: decided on the device, no host sync. Others: one sync, then gradients are set to ``None``, which
    leaves weights, moments and step counts as untouched. Called more than once for a step, any one skip holds.
    """
    progress = Progress.of(trainer)
    if is_fused(optimizer):
        flag = skip.to(torch.float32)
        earlier = getattr(optimizer, FOUND_INF, None)
        if earlier is not None:
            progress.note_skipped(skip & (earlier == 0))
            flag = torch.maximum(earlier, flag)
        else:
            progress.note_skipped(skip)
        setattr(optimizer, FOUND_INF, flag)
        setattr(optimizer, KEPT, flag)
    elif bool(skip):
        gradients = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        progress.note_skipped(bool(gradients))
        for parameter in gradients:
            parameter.grad = None


def divide_gradients(optimizer: Any, divisor: Tensor) -> None:
    """Divide all gradients of this step by ``divisor`` (0-d fp32 tensor), inside the kernel where it is fused."""
    if is_fused(optimizer):
        earlier = getattr(optimizer, GRAD_SCALE, None)
        setattr(optimizer, GRAD_SCALE, divisor if earlier is None else earlier * divisor)
        return
    if local := local_gradients(optimizer):
        torch._foreach_div_(local, divisor)


def local_gradients(optimizer: Any) -> list[Tensor]:
    """The gradients that an optimizer would step on, or this rank's pieces of them."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [g.to_local() if hasattr(g, "to_local") else g for g in gradients]


def clear(optimizer: Any) -> None:
    """Take the attributes away again; a step without our callbacks must find none."""
    for name in (FOUND_INF, GRAD_SCALE, KEPT):
        optimizer.__dict__.pop(name, None)


def clear_after_each_step(optimizer: Any) -> Any:
    """Register :func:`clear` as the optimizer's step post-hook; returns the handle that removes it."""
    return optimizer.register_step_post_hook(lambda opt, args, kwargs: clear(opt))


def skip_under_scaler(optimizer: Any) -> Any:
    """Make :func:`skip_step` hold under a gradient scaler; use instead of :func:`clear_after_each_step`.

    Just before the step the flag is merged with what the scaler found. The scaler decides by its own finding alone
    whether to lower the loss scale, so a skip of ours does not halve it. It also takes the two attributes away itself.
    Returns the handle that removes the hook.
    """

    def merge(opt: Any, args: Any, kwargs: Any) -> None:
        kept = opt.__dict__.pop(KEPT, None)
        if kept is not None and hasattr(opt, FOUND_INF):
            setattr(opt, FOUND_INF, torch.maximum(getattr(opt, FOUND_INF), kept))

    return optimizer.register_step_pre_hook(merge)


def tell_of_sync(optimizer: Any, who: str) -> None:
    """Say in one line that skipping waits for the device where the optimizer is not fused, and how to avoid it."""
    remedy = "give it fused=True" if "fused" in optimizer.defaults else "take one with a fused kernel, such as AdamW,"
    rank_zero_warn(
        f"{who}: {type(optimizer).__name__} is not fused, so every step waits for the device once to learn whether it"
        f" is skipped; {remedy} to avoid it."
    )
