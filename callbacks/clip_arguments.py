"""What GradClip refuses: arguments out of range, and company in which it could not act rightly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .ada_gc import AdaGC
from .base import MisconfigurationException, refuse_manual_optimization
from .shards import has_flat_parameters
from .z_clip import ZClip

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def refuse_broken(max_norm: float | None, scope: Any, adaptive: ZClip | None, ada_gc: AdaGC | None) -> None:
    """Raise with one sentence for every argument that breaks its rule."""
    problems = []
    if max_norm is not None and not (max_norm > 0 and math.isfinite(max_norm)):
        problems.append(f"`GradClip(max_norm={max_norm})`: must be a finite number > 0.")
    if scope == []:
        problems.append(
            "`GradClip(scope=[])`: must be one of global, group, layer, tensor, or a list of patterns for module names."
        )
    if adaptive is not None and ada_gc is not None:
        problems.append("`GradClip(adaptive=..., ada_gc=...)`: are two rules for one threshold; set one to null.")
    if problems:
        raise MisconfigurationException("\n".join(problems))


def refuse_other_clipping(trainer: Trainer, pl_module: LightningModule) -> None:
    """Raise when something else would clip as well, or when a step cannot be acted on here."""
    if trainer.gradient_clip_val:
        raise MisconfigurationException(
            f"`Trainer(gradient_clip_val={trainer.gradient_clip_val})`: gradients would be clipped twice, since"
            " `GradClip` is on as well; delete gradient_clip_val."
        )
    own = getattr(type(pl_module), "configure_gradient_clipping", None)
    if getattr(own, "__module__", "").split(".")[0] not in ("lightning", "pytorch_lightning"):
        raise MisconfigurationException(
            f"`{type(pl_module).__name__}.configure_gradient_clipping` is overridden: gradients would be clipped"
            " twice, since `GradClip` is on as well; delete the method."
        )
    refuse_manual_optimization(
        pl_module,
        "`GradClip` acts before Lightning's own optimizer step; use automatic optimization, or clip in training_step.",
    )


def refuse_flat_parameters(trainer: Trainer, scope: Any) -> None:
    """Raise when parts are to be told apart that FSDP1 has mixed."""
    if has_flat_parameters(trainer) and scope not in ("global", "group"):
        raise MisconfigurationException(
            f"`FSDPStrategy(use_orig_params=False)`: its flat parameters hold several tensors each, which"
            f" `GradClip(scope={scope!r})` could not tell apart; set use_orig_params=True."
        )
