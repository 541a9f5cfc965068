"""Where in the sample stream the samples of a micro-batch stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .batch_tensors import samples_and_tokens
from .positions import stream_position
from .progress import Progress
from .topology import data_parallel_rank, data_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def sample_places(trainer: Trainer, module: LightningModule, batch: Any) -> list[int]:
    """Stream index of each sample of this rank's micro-batch; asked while it is the last one that has begun.

    As a stream hands them out whose micro-batches go to the ranks in turn, dropped ranges left out.
    """
    progress = Progress.of(trainer)
    rows, _ = getattr(module, "count_batch", samples_and_tokens)(batch)
    size = rows // progress.rows_per_sample
    # The counters hold this micro-batch, of all ranks, as pending already.
    begun = progress.samples + progress.pending_samples - size * data_parallel_size(trainer)
    first = begun + data_parallel_rank(trainer) * size
    return [stream_position(first + row, progress.dropped) for row in range(size)]
