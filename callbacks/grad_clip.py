"""Clip the global gradient norm, on the device, under any strategy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .base import MisconfigurationException, StabilityCallback, is_logging_step
from .device_step import clear, clear_after_each_step, divide_gradients, skip_step
from .grad_norm import GradNorm
from .progress import Progress

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GradClip(StabilityCallback):
    """Scale all gradients down so that their global L2 norm is at most ``max_norm``.

    The factor is ``min(1, max_norm / norm)`` exactly (no epsilon), so an unclipped step is bit-identical to one
    without the callback. With a fused optimizer the division happens inside its kernel and nothing waits for the
    device. Use it instead of ``Trainer(gradient_clip_val=...)``, which Lightning refuses under FSDP and which a skip
    decision could not see. Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.

    A norm that is not finite has no clipped value: that step changes nothing (weights, moments and step count stay
    bit-identical) and is counted in ``Progress.skipped``.

    Logged: ``stability/clip_frac`` (fraction of the steps since the last logging step that were clipped),
    ``stability/grad_norm`` (by ``GradNorm``, before clipping).

    Args:
        max_norm: Largest global L2 norm, > 0. BloombergGPT v2: 0.3; OPT and BLOOM: 1.0.

    Raises:
        MisconfigurationException: when ``max_norm`` is not a positive number, when the Trainer or the LightningModule
            clips as well, under manual optimization, or under a gradient scaler (16-bit mixed precision).

    Example::

        >>> Trainer(callbacks=[GradClip(max_norm=1.0)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 40

    def __init__(self, max_norm: float = 1.0) -> None:
        if not (max_norm > 0 and math.isfinite(max_norm)):
            raise MisconfigurationException(f"`GradClip(max_norm={max_norm})`: must be a finite number > 0.")
        self.max_norm = max_norm
        self._clipped: float | Tensor = 0.0
        self._seen = 0
        self._hooks: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_other_clipping(trainer, pl_module)
            GradNorm.of(trainer)
            Progress.of(trainer)  # here, so that a resume restores its count of skipped steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks = [clear_after_each_step(optimizer) for optimizer in trainer.optimizers]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        norm = GradNorm.of(trainer).value
        assert norm is not None
        finite = torch.isfinite(norm)
        # Dividing by exactly 1.0 leaves every bit in place; a non-finite norm must not reach the kernel as a divisor.
        divisor = torch.where(finite, (norm / self.max_norm).clamp(min=1.0), torch.ones_like(norm))
        skip_step(trainer, optimizer, ~finite)
        divide_gradients(optimizer, divisor)
        self._clipped = self._clipped + (divisor > 1.0)
        self._seen += 1
        if is_logging_step(trainer):
            pl_module.log("stability/clip_frac", self._clipped / self._seen)
            self._clipped, self._seen = 0.0, 0

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for optimizer in trainer.optimizers:
            clear(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"clipped": float(self._clipped), "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._clipped, self._seen = float(state_dict["clipped"]), int(state_dict["seen"])


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
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"`{type(pl_module).__name__}.automatic_optimization=False`: `GradClip` acts before Lightning's own"
            " optimizer step; use automatic optimization, or clip in training_step."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise MisconfigurationException(
            f"`Trainer(precision={trainer.precision!r})`: its gradient scaler overwrites the clipping factor; use"
            " bf16-mixed."
        )
