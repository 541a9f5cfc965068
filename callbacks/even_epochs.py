"""Epochs of one length on all ranks, whatever their training loaders hold."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from .base import rank_zero_warn
from .private_names import cut_epoch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_ENDLESS = sys.maxsize


def end_with_the_shortest(trainer: Trainer) -> None:
    """End this epoch, and those that read the same loaders, where the shortest training loader of all ranks ends.

    Lightning takes each rank's own length: the rank with the shortest loader would step early and leave, and the others
    would wait for its gradients. A collective, for which the host waits: all ranks call it, once for each new loader.
    """
    if trainer.world_size == 1:
        return
    own = trainer.num_training_batches
    number = _ENDLESS if own == float("inf") else int(own)
    # Of a number and its negative, the least are the shortest and the longest.
    both = torch.tensor([number, -number], device=trainer.strategy.root_device)
    shortest, longest = trainer.strategy.reduce(both, reduce_op="min").tolist()
    if shortest == -longest:
        return
    most = "endlessly many" if -longest == _ENDLESS else f"{-longest:,}"
    rank_zero_warn(
        f"training loaders of {shortest:,} to {most} batches on {trainer.world_size} ranks: every epoch ends"
        f" after {shortest:,}, and what the longer ones hold beyond is not trained on; shard the data evenly to use it."
    )
    if number > shortest:
        _cut(trainer, number, shortest)


def _cut(trainer: Trainer, before: int, batches: int) -> None:
    interval = trainer.val_check_interval  # a share of the epoch, unless a count or a callback of ours decides
    if isinstance(interval, float) and trainer.val_check_batch == max(1, int(before * interval)):
        trainer.val_check_batch = max(1, int(batches * interval))
    cut_epoch(trainer, batches)
