"""Whether a gradient scaler takes the steps, and by which attributes it and fused optimizers talk."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# A fused torch optimizer reads two attributes at `step()`: `found_inf` (1.0: weights, moments and step count stay
# untouched, bit for bit, even if gradients are NaN) and `grad_scale` (gradients are divided by it in the kernel).
FOUND_INF, GRAD_SCALE = "found_inf", "grad_scale"


def has_scaler(trainer: Trainer) -> bool:
    """Whether a gradient scaler takes the steps, as under 16-bit mixed precision."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and bool(scaler.is_enabled())
