"""A clipping threshold that follows the gradient norm: z-score against its running mean and variance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import MisconfigurationException

#: Least spread, as a fraction of the mean. A flat history would make every later norm an outlier.
FLOOR = 0.01


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
        if problems:
            raise MisconfigurationException("\n".join(problems))


class NormStatistics:
    """Running mean and variance of a norm, kept and judged on its device: nothing here waits for it.

    Mean and variance of the first ``warmup_steps`` norms are exact; from then on they are exponential averages. A norm
    above ``mean + z_threshold * spread`` is to be clipped to ``mean + z_threshold^2 * spread / z``, the lower the
    farther it is out (the paper's reciprocal clipping), and enters the averages at that value. One that is not finite
    enters nothing. Unlike in the paper the spread is at least 1 % of the mean.

    After a lasting rise norms stay clipped near the old level and the averages hardly follow, as in the paper: the
    fraction of clipped steps tells.
    """

    def __init__(self, options: ZClip) -> None:
        self.options = options
        self.values = torch.zeros(3)  # norms counted (up to warmup_steps), mean, variance

    def to(self, device: torch.device) -> None:
        """Move the state beside the norms. Waits for the device, so not within a step."""
        self.values = self.values.to(device)

    def judge(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Take one norm in, and say what it may be.

        Args:
            norm: 0-d fp32, of this step, on the device of the state.

        Returns:
            Two 0-d tensors: the largest value that this norm may keep (infinite if it is no outlier), and the level
            above which it would have been one (infinite while the statistics warm up).
        """
        z_threshold, decay = self.options.z_threshold, self.options.decay
        count, mean, variance = self.values.unbind()
        warming_up = count < self.options.warmup_steps
        spread = torch.maximum(variance.sqrt(), FLOOR * mean)
        level = torch.where(warming_up, math.inf, mean + z_threshold * spread)
        outlier = torch.isfinite(norm) & (norm > level) & (spread > 0)
        z = (norm - mean) / spread  # not a number while nothing is known; not used then
        limit = torch.where(outlier, mean + z_threshold**2 * spread / z, math.inf)
        kept = torch.minimum(norm, limit)

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
        self.values = torch.where(torch.isfinite(norm), new, self.values)
        return limit, level
