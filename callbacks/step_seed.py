"""Random numbers as a function of position, so that a resume needs no generator state."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from .base import StabilityCallback
from .progress import Progress
from .seeds import mix, seed_torch
from .topology import data_parallel_rank

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StepSeed(StabilityCallback):
    """Seed torch, ``random`` and NumPy before every micro-batch from where the run stands.

    The seed is a hash of (``seed``, samples committed, samples pending in the window, data-parallel rank). So dropout
    after a resume is what it would have been, any step can be replayed alone, and nothing is saved or gathered.
    Tensor-parallel ranks of one group draw the same numbers, as replicated activations need.

    ``ValidateEverySteps`` has the generators seeded before a validation too, also one that is made after a resume: it
    draws the same numbers there, for the order of its loader too.

    Nothing is logged: there is nothing to measure but the equality of two runs.

    Args:
        seed: Any integer; another one gives independent draws.

    Example::

        >>> Trainer(callbacks=[StepSeed(seed=1)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 5

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        Progress.of(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._seed(trainer, Progress.of(trainer).pending_samples)

    def seed_validation(self, trainer: Trainer) -> None:
        """Seed for the validation that follows the step just taken."""
        self._seed(trainer, -1)  # or the next micro-batch would draw the same

    def _seed(self, trainer: Trainer, pending_samples: int) -> None:
        value = mix(self.seed, Progress.of(trainer).samples, pending_samples, data_parallel_rank(trainer))
        seed_torch(value >> 1, trainer.lightning_module.device)  # which takes 63 bits
        random.seed(value)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(value & 0xFFFFFFFF)
