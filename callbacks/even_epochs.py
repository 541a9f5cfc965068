"""Epochs of one length on all ranks, whatever their training loaders hold."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from .base import MisconfigurationException, rank_zero_warn
from .host_agreement import HostAgreement
from .private_names import cut_epoch, has_run_dry, make_last_batch, ready_batches

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
    _judge_interval(trainer, shortest)
    if shortest == -longest:
        return
    most = "endlessly many" if -longest == _ENDLESS else f"{-longest:,}"
    rank_zero_warn(
        f"training loaders of {shortest:,} to {most} batches on {trainer.world_size} ranks: every epoch ends"
        f" after {shortest:,}, and what the longer ones hold beyond is not trained on; shard the data evenly to use it."
    )
    if number > shortest:
        _cut(trainer, number, shortest)


def end_with_the_first_that_runs_dry(trainer: Trainer, ranks: HostAgreement) -> None:
    """End this epoch with the batch that has just begun, where it is the last one of the loader of any rank.

    For loaders without a length, whose end is known only when it comes. All ranks call it for each micro-batch; the
    hosts agree.
    """
    if not ranks.is_open or not _is_unsized(trainer):
        return
    dry, empty = ranks.begin_sums([int(trainer.is_last_batch), 0])()
    _refuse_empty(trainer, empty)
    if 0 < dry < trainer.world_size:
        rank_zero_warn(
            f"training loaders without a length, on {trainer.world_size} ranks: some run dry before others; every epoch"
            " ends with the first that does, and what the others hold beyond is not trained on; shard the data evenly"
            " to use it."
        )
    if dry:
        make_last_batch(trainer)


def refuse_a_rank_without_data(trainer: Trainer, ranks: HostAgreement) -> None:
    """Raise on all ranks where a loader without a length has no batch: its rank would leave, and the others wait."""
    if ranks.is_open:
        _refuse_empty(trainer, ranks.begin_sums([0, int(_is_unsized(trainer) and has_run_dry(trainer))])()[1])


def refuse_an_empty_epoch(trainer: Trainer, ranks: HostAgreement) -> None:
    """Raise where an epoch has ended without a batch, such as the second over an iterator that is read once.

    Lightning would begin one empty epoch after the other, for ever if only ``max_steps`` ends the run. To be called at
    the end of each epoch, also on one process. Ranks that have data are then at their first batch, in
    :func:`end_with_the_first_that_runs_dry`, and raise there: both calls take part in one sum of the same two numbers.
    """
    asks = _is_unsized(trainer) or trainer.world_size == 1  # under `limit_train_batches` other ranks would not answer
    if asks and not ready_batches(trainer) and has_run_dry(trainer):
        _refuse_empty(trainer, ranks.begin_sums([0, 1])()[1])


def _is_unsized(trainer: Trainer) -> bool:
    return trainer.num_training_batches == float("inf")


def _refuse_empty(trainer: Trainer, empty_ranks: int) -> None:
    if empty_ranks:
        where = f" on {empty_ranks} of {trainer.world_size} ranks" if trainer.world_size > 1 else ""
        raise MisconfigurationException(
            f"training loader: no batch in epoch {trainer.current_epoch}{where}; let its `__iter__` begin anew at every"
            " epoch and give each rank some of the data, or train for fewer epochs or on fewer ranks."
        )


class LaterJudged(int):
    """``Trainer(val_check_interval=N)``, which Lightning does not compare with the length of one rank's loader.

    It refuses an N above that, and would on the rank with the shorter loader alone, while the others wait for it.
    """

    def __gt__(self, other: float) -> bool:
        return False


def judge_the_interval_later(trainer: Trainer) -> None:
    """To be called in ``setup``; :func:`end_with_the_shortest` judges it."""
    interval = getattr(trainer, "val_check_interval", None)  # there is none where validation goes by the clock
    if trainer.world_size > 1 and type(interval) is int:
        trainer.val_check_interval = LaterJudged(interval)


def restore_the_interval(trainer: Trainer) -> None:
    """Undo :func:`judge_the_interval_later`."""
    if isinstance(getattr(trainer, "val_check_interval", None), LaterJudged):
        trainer.val_check_interval = int(trainer.val_check_interval)


def _judge_interval(trainer: Trainer, shortest: int) -> None:
    if not isinstance(trainer.val_check_batch, LaterJudged):
        return
    trainer.val_check_batch = every = int(trainer.val_check_batch)
    if every > shortest and trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0:
        raise MisconfigurationException(
            f"`Trainer(val_check_interval={every})`: the shortest training loader of {trainer.world_size} ranks holds"
            f" {shortest:,} batches, so that many is the most; give a smaller one, or set check_val_every_n_epoch to"
            " None (YAML: null) to count over epochs."
        )


def _cut(trainer: Trainer, before: int, batches: int) -> None:
    interval = trainer.val_check_interval  # a share of the epoch, unless a count or a callback of ours decides
    if isinstance(interval, float) and trainer.val_check_batch == max(1, int(before * interval)):
        trainer.val_check_batch = max(1, int(batches * interval))
    cut_epoch(trainer, batches)
