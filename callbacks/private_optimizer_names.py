"""The private names of optimizers, schedulers and scalers that the package touches: see :mod:`.private_names`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def loss_scale(trainer: Trainer) -> Tensor | None:
    """The factor, a 0-d tensor on the device, by which a gradient scaler multiplied the loss; ``None`` without one.

    The public ``get_scale`` waits for the device.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    scale: Tensor | None = scaler._scale
    return scale


def unscales_in_step(optimizer: Any) -> bool:
    """Whether a gradient scaler leaves the division of gradients to this optimizer's kernel, as with fused ones."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def after_step_first(optimizer: Any, hook: Callable[..., None]) -> Any:
    """Register a step post-hook that runs before those that are there already; returns the handle that removes it.

    They put back what the step was taken with: the learning rate, ``found_inf``. torch lets hooks be added at the end
    only.
    """
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
    return handle


def inner_schedulers(scheduler: Any) -> list[Any]:
    """The schedulers that a SequentialLR or ChainedScheduler runs; empty for others. torch names them nowhere else."""
    return list(getattr(scheduler, "_schedulers", ()))


def fused_adam(decoupled: bool) -> Callable[..., None]:
    """The kernel of a fused Adam or, with decoupled decay, AdamW.

    The public functions count steps by themselves, which a parameter that is stepped on in parts cannot have, and take
    AdamW's decay only from torch 2.7 on.
    """
    kernel: Callable[..., None] = torch._fused_adamw_ if decoupled else torch._fused_adam_
    return kernel


def is_mock_optimizer(optimizer: Any) -> bool:
    """Whether it is the placeholder that Lightning makes where ``configure_optimizers`` returns None."""
    return type(optimizer).__name__ == "_MockOptimizer"  # by name: each of the two namespaces has its own


def pinned_step(optimizer: Any) -> str | None:
    """What has replaced ``step`` on the instance: ``scheduler``, ``other`` or ``None``.

    A learning-rate scheduler pins the bound method of the class that the optimizer had, so another class's would never
    be called.
    """
    step = vars(optimizer).get("step")
    if step is None:
        return None
    return "scheduler" if getattr(step, "_wrapped_by_lr_sched", False) else "other"


def swap_class(optimizer: Any, cls: type) -> None:
    """Make an optimizer an instance of another class in place: its step hooks run, and its scheduler's pin holds."""
    pinned = vars(optimizer).pop("step", None) is not None
    optimizer.__class__ = cls
    optimizer._patch_step_function()  # what runs the hooks is put around `step` once a class, at construction
    if not pinned:
        return
    reference, function = weakref.ref(optimizer), cls.step  # type: ignore[attr-defined]

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        owner: Any = reference()
        owner._opt_called = True  # the scheduler warns without it
        return function(owner, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
