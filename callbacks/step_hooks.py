"""Hosts whose optimizer step cannot be acted on from outside: refused with a sentence instead of failing in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import MisconfigurationException

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def require_step_hooks(optimizer: Any) -> None:
    """Raise when an optimizer, a wrapper of somebody's making, has no hooks around its step."""
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise MisconfigurationException(
            f"`{type(optimizer).__name__}`: is no torch.optim.Optimizer and has no hooks around its step, by which"
            " learning rates are set and gradients clipped; derive it from torch.optim.Optimizer, or return the"
            " optimizer inside it from configure_optimizers."
        )


def refuse_engine(trainer: Trainer, who: str) -> None:
    """Raise under DeepSpeed: its engine holds the gradients and takes the step, and looks at nothing that we set."""
    if hasattr(type(trainer.strategy), "deepspeed_engine"):
        raise MisconfigurationException(
            f"`{type(trainer.strategy).__name__}`: its engine keeps the gradients and takes the step, so `{who}` would"
            " do nothing; use strategy='fsdp' or ModelParallelStrategy (FSDP2), or the engine's own options."
        )
