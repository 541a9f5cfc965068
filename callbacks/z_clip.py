"""A clipping threshold that follows the gradient norm: z-score against its running mean and variance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .argument_types import judges_arguments
from .base import MisconfigurationException, refuse_all
from .part_statistics import PartStatistics

#: Least spread, as a fraction of the mean. A flat history would make every later norm an outlier.
FLOOR = 0.01


@judges_arguments(MisconfigurationException)
@dataclass(frozen=True)
class ZClip:
    """Options of the adaptive threshold (Kumar et al. 2025, arXiv:2504.02507, whose defaults these are).

    Raises:
        MisconfigurationException: when a value is out of its range.
    """

    z_threshold: float = 2.5
    """Standard deviations above the running mean at which a norm is an outlier, > 0."""
    decay: float = 0.97
    """Of the running mean and variance, in (0, 1); 0.97 remembers about 33 steps."""
    warmup_steps: int = 25
    """Finite norms that are only collected before the first is judged, >= 2."""

    def __post_init__(self) -> None:
        problems = []
        if not (self.z_threshold > 0 and math.isfinite(self.z_threshold)):
            problems.append(f"`ZClip(z_threshold={self.z_threshold})`: must be a finite number > 0.")
        if not 0 < self.decay < 1:
            problems.append(f"`ZClip(decay={self.decay})`: must lie between 0 and 1.")
        if self.warmup_steps < 2:
            problems.append(f"`ZClip(warmup_steps={self.warmup_steps})`: must be at least 2.")
        refuse_all(problems)


class NormStatistics(PartStatistics):
    """Running mean and variance of the norm of each part.

    Mean and variance of the first ``warmup_steps`` norms are exact; from then on they are exponential averages. A norm
    above ``mean + z_threshold * spread`` is to be clipped to ``mean + z_threshold^2 * spread / z``, the lower the
    farther it is out (the paper's reciprocal clipping), and enters the averages at that value. Unlike in the paper the
    spread is at least 1 % of the mean.

    After a lasting rise norms stay clipped near the old level and the averages hardly follow, as in the paper: the
    fraction of clipped steps tells.
    """

    rows: ClassVar[int] = 3  # norms counted (up to warmup_steps), mean, variance

    def __init__(self, options: ZClip) -> None:
        super().__init__()
        self.options = options

    def judge(self, norms: Tensor, total: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        z_threshold, decay = self.options.z_threshold, self.options.decay
        count, mean, variance = self.values.unbind()
        warming_up = count < self.options.warmup_steps
        spread = torch.maximum(variance.sqrt(), FLOOR * mean)
        level = torch.where(warming_up, math.inf, mean + z_threshold * spread)
        outlier = torch.isfinite(norms) & (norms > level) & (spread > 0)
        z = (norms - mean) / spread  # not a number while nothing is known; not used then
        limit = torch.where(outlier, mean + z_threshold**2 * spread / z, math.inf)
        kept = torch.minimum(norms, limit)

        first = kept - mean
        exact_mean = mean + first / (count + 1)
        exact_variance = (count * variance + first * (kept - exact_mean)) / (count + 1)
        new_mean = decay * mean + (1 - decay) * kept
        new_variance = decay * variance + (1 - decay) * (kept - new_mean).square()
        new = torch.stack(
            [
                count + warming_up,
                torch.where(warming_up, exact_mean, new_mean),
                torch.where(warming_up, exact_variance, new_variance),
            ]
        )
        self._take_in(new, norms, accepted)
        return limit, level
