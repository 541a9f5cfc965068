"""Skip or scale an optimizer step on the device, through what fused optimizers already read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import rank_zero_warn
from .gradient_scaler import FOUND_INF, GRAD_SCALE, has_scaler
from .private_optimizer_names import unscales_in_step
from .progress import Progress
from .shards import local
from .step_hooks import require_step_hooks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# A gradient scaler writes `found_inf` and `grad_scale` just before the step, and what it makes of a `grad_scale` that
# is there has changed with torch's versions: what we asked for is kept under names of our own.
KEPT, KEPT_DIVISOR = "stability_found_inf", "stability_divisor"


def is_fused(optimizer: Any) -> bool:
    """True if the optimizer's own step reads ``found_inf`` and ``grad_scale``.

    Not by its groups alone: a wrapper around a fused optimizer shares these, and the one inside looks at itself.
    """
    return unscales_in_step(optimizer) and all(group.get("fused") for group in optimizer.param_groups)


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


def divide_gradients(trainer: Trainer, optimizer: Any, divisor: Tensor) -> None:
    """Divide all gradients of this step by ``divisor`` (0-d fp32 tensor), inside the kernel where it is fused."""
    if is_fused(optimizer):
        name = KEPT_DIVISOR if has_scaler(trainer) else GRAD_SCALE
        earlier = getattr(optimizer, name, None)
        setattr(optimizer, name, divisor if earlier is None else earlier * divisor)
        return
    if pieces := local_gradients(optimizer):
        torch._foreach_div_(pieces, divisor)


def local_gradients(optimizer: Any) -> list[Tensor]:
    """The gradients that an optimizer would step on, or this rank's pieces of them."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [local(g) for g in gradients]


def clear(optimizer: Any) -> None:
    """Take the attributes away again; a step without our callbacks must find none."""
    for name in (FOUND_INF, GRAD_SCALE, KEPT, KEPT_DIVISOR):
        optimizer.__dict__.pop(name, None)


def clear_all(trainer: Trainer) -> None:
    """:func:`clear` for every optimizer: at the end, and before each batch, since a step may not have come.

    A gradient scaler takes none where ``training_step`` returned no loss.
    """
    for optimizer in trainer.optimizers:
        clear(optimizer)


def hook_steps(trainer: Trainer, optimizer: Any) -> Any:
    """Register what :func:`skip_step` and :func:`divide_gradients` need around each step of a fit.

    Without a scaler the attributes are taken away after the step. With one they are merged with its own just before
    the step: it decides by its own finding alone whether to lower the loss scale, so a skip of ours does not halve it,
    and takes its two attributes away itself. Any number of callbacks may call this.

    Returns:
        The handle that removes the hook.
    """
    require_step_hooks(optimizer)
    if has_scaler(trainer):
        return optimizer.register_step_pre_hook(lambda opt, args, kwargs: _merge(opt))
    return optimizer.register_step_post_hook(lambda opt, args, kwargs: clear(opt))


def _merge(optimizer: Any) -> None:
    skip, divisor = (optimizer.__dict__.pop(name, None) for name in (KEPT, KEPT_DIVISOR))
    if skip is not None and hasattr(optimizer, FOUND_INF):
        setattr(optimizer, FOUND_INF, torch.maximum(getattr(optimizer, FOUND_INF), skip))
    if divisor is not None:
        scale = getattr(optimizer, GRAD_SCALE, None)
        setattr(optimizer, GRAD_SCALE, divisor if scale is None else scale * divisor)


def tell_of_sync(optimizer: Any, who: str) -> None:
    """Say in one line that skipping waits for the device where the optimizer is not fused, and how to avoid it."""
    if any(group.get("fused") for group in optimizer.param_groups):
        remedy = "return the fused one inside it from configure_optimizers"
    elif "fused" in optimizer.defaults:
        remedy = "give it fused=True"
    else:
        remedy = "take one with a fused kernel, such as AdamW,"
    rank_zero_warn(
        f"{who}: {type(optimizer).__name__} is not fused, so every step waits for the device once to learn whether it"
        f" is skipped; {remedy} to avoid it."
    )
