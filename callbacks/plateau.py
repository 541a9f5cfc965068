"""Detector: the validation loss no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .argument_types import judges_arguments
from .base import MisconfigurationException
from .detector import Detector, require
from .events import Event


@judges_arguments(MisconfigurationException)
@dataclass
class Plateau(Detector):
    """No evaluation was better than the best by ``min_improvement`` for ``patience`` steps.

    Tells whether the training loss still falls meanwhile: a growing gap between both is over-fitting or a change of the
    data, a plateau of both is the end of what this learning rate can do. One event per plateau. A checkpoint that was
    saved at a step before its validation does not hold that one, and a run resumed from it goes on without.

    Evidence: the validation loss, the best one and its step, the training loss (mean since the last evaluation), the
    gap validation - training now and at the best step.

    Source: BloombergGPT's training chronicles (stalls of v0, v1 and v2, rows of 20k and 18k steps without a gain).
    """

    kind: ClassVar[str] = "plateau"
    memory: ClassVar[tuple[str, ...]] = ("_best", "_best_step", "_best_gap", "_sum", "_count", "_told")

    patience: int = 10_000
    """Steps without a gain, >= 1."""
    min_improvement: float = 0.005
    """Smallest gain that counts, in nats, >= 0."""
    signal: str = "val_loss"
    """Name of the validation loss."""
    training: str = "loss"
    """Name of the training loss."""

    def __post_init__(self) -> None:
        require(
            self,
            patience=(self.patience >= 1, "at least 1"),
            min_improvement=(self.min_improvement >= 0, "0 or more"),
        )
        self._best, self._best_step, self._best_gap = math.inf, 0, math.inf
        self._sum, self._count = 0.0, 0  # training losses since the last evaluation
        self._told = False

    def observe(self, step: int, values: Mapping[str, float]) -> list[Event]:
        training = values.get(self.training, math.nan)
        if math.isfinite(training):
            self._sum, self._count = self._sum + training, self._count + 1
        value = values.get(self.signal, math.nan)
        if not math.isfinite(value):
            return []
        mean = self._sum / self._count if self._count else math.nan
        self._sum, self._count = 0.0, 0
        if value < self._best - self.min_improvement:
            self._best, self._best_step, self._best_gap, self._told = value, step, value - mean, False
            return []
        if self._told or step - self._best_step < self.patience:
            return []
        self._told = True
        evidence: dict[str, Any] = {
            "val_loss": value,
            "best": self._best,
            "best_step": float(self._best_step),
            "train_loss": mean,
            "gap": value - mean,
            "gap_at_best": self._best_gap,
        }
        return [Event(step, self.kind, evidence)]
