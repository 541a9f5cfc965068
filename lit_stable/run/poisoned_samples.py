"""A drill: a stretch of training data that kills a run."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_stable.callbacks import Progress
from lit_stable.callbacks.base import MisconfigurationException, StabilityCallback
from lit_stable.callbacks.positions import stream_position
from lit_stable.callbacks.topology import data_parallel_rank, data_parallel_size


class PoisonedSamples(StabilityCallback):
    """Make the loss of every micro-batch NaN that holds certain samples, as an overflow in its forward pass would.

    Samples are named by their place in the stream, before anything is dropped: a run that leaves them out never sees
    them, and one that goes back and reads on comes by them again. Where nothing keeps such a step out, all weights are
    NaN after it. For drills of the recovery ladder; see ``recipes/demo/rescue.yaml``.

    Nothing is logged.

    Args:
        first: First place in the stream, >= 0.
        last: Last place, included.

    Raises:
        MisconfigurationException: when ``first`` is below 0 or above ``last``.
    """

    order: ClassVar[int] = 6  # behind the counters, before those who take in the loss

    def __init__(self, first: int, last: int) -> None:
        if not 0 <= first <= last:
            raise MisconfigurationException(
                f"`PoisonedSamples(first={first}, last={last})`: must be 0 <= first <= last."
            )
        self.first, self.last = first, last
        self._hit = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        Progress.of(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        progress, size = Progress.of(trainer), len(batch["labels"])
        # The counters hold this micro-batch of all ranks as pending already.
        begun = progress.samples + progress.pending_samples - size * data_parallel_size(trainer)
        first = begun + data_parallel_rank(trainer) * size
        places = [stream_position(first + row, progress.dropped) for row in range(size)]
        self._hit = any(self.first <= place <= self.last for place in places)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._hit:
            loss.mul_(math.nan)
