"""A clipping threshold for each tensor, relative to what its own gradient norm has been."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .argument_types import judges_arguments
from .base import MisconfigurationException, refuse_all
from .part_statistics import PartStatistics


@judges_arguments(MisconfigurationException)
@dataclass(frozen=True)
class AdaGC:
    """Options of the relative threshold (Wang et al. 2025, arXiv:2502.11034, algorithm 1, whose defaults these are).

    Raises:
        MisconfigurationException: when a value is out of its range.
    """

    rel_threshold: float = 1.05
    """Multiple of the running norm above which a norm is clipped to that multiple, >= 1."""
    decay: float = 0.98
    """Of the running norm, in (0, 1); 0.98 remembers about 50 steps."""
    warmup_steps: int = 100
    """Steps that are clipped by their global norm while the running norms are sought, >= 1."""
    warmup_max_norm: float = 1.0
    """Largest global norm of those steps, > 0."""

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.rel_threshold < math.inf:
            problems.append(f"`AdaGC(rel_threshold={self.rel_threshold})`: must be a finite number, 1 or more.")
        if not 0 < self.decay < 1:
            problems.append(f"`AdaGC(decay={self.decay})`: must lie between 0 and 1.")
        if self.warmup_steps < 1:
            problems.append(f"`AdaGC(warmup_steps={self.warmup_steps})`: must be at least 1.")
        if not 0 < self.warmup_max_norm < math.inf:
            problems.append(f"`AdaGC(warmup_max_norm={self.warmup_max_norm})`: must be a finite number > 0.")
        refuse_all(problems)


class RunningNorms(PartStatistics):
    """The running norm of each part, fed with norms as they were clipped.

    While a part warms up, gradients are scaled so that the global norm is at most ``warmup_max_norm``, and its running
    norm is the smallest that it then had. From there on a norm above ``rel_threshold`` times the running norm is
    clipped to that, and the running norm is the exponential average of what was kept. It can rise by no more than the
    factor ``1 + (1 - decay) * (rel_threshold - 1)`` per step, 1.001 with the defaults, and it falls freely.
    """

    rows: ClassVar[int] = 2  # norms counted (up to warmup_steps), running norm

    def __init__(self, options: AdaGC) -> None:
        super().__init__()
        self.options = options

    def judge(self, norms: Tensor, total: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        options = self.options
        count, running = self.values.unbind()
        warming_up = count < options.warmup_steps
        # A part that warms up is clipped with all others: the level that it tells is one of the global norm.
        level = torch.where(warming_up, options.warmup_max_norm, options.rel_threshold * running)
        limit = torch.where(warming_up, norms / (total / options.warmup_max_norm).clamp(min=1.0), level)
        kept = torch.minimum(norms, limit)
        smallest = torch.where(count == 0, kept, torch.minimum(running, kept))
        moved = options.decay * running + (1 - options.decay) * kept
        new = torch.stack([count + warming_up, torch.where(warming_up, smallest, moved)])
        self._take_in(new, norms, accepted)
        return limit, level
