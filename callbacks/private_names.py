"""Every private name of Lightning's loops and connectors that the package touches, each with its reason.

Those of optimizers are in :mod:`.private_optimizer_names`, of FSDP1 in :mod:`.private_fsdp_names`, of torch's files and
checkpoints in :mod:`.private_storage_names`.

``tests/callbacks/test_private_*.py`` pin each one: an upgrade that moves it fails there, with the reason in sight.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def ready_batches(trainer: Trainer) -> int:
    """Micro-batches begun in this epoch: the number that Lightning takes modulo the accumulation window."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def window_is_open(trainer: Trainer) -> bool:
    """True while micro-batches of an unfinished accumulation window have been run."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def batches_that_stepped(trainer: Trainer) -> int:
    """The loggers' step counter, their x axis: batches, of those before this one, that ended with an optimizer step.

    A batch is counted behind its ``on_train_batch_end``, so that the number is the same in all hooks of a step. Not
    ``global_step``, which counts each of several optimizers, and is one ahead or behind after some resumes.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def cut_epoch(trainer: Trainer, batches: int) -> None:
    """End this epoch and later ones after so many batches, as ``limit_train_batches`` would have, had it been known.

    The fetcher has its own copy of the length, by which it tells the last batch; it takes a new one each epoch.
    """
    loop: Any = trainer.fit_loop
    loop.max_batches = batches
    loop._combined_loader.limits = [min(limit, batches) for limit in loop._combined_loader.limits]
    loop._data_fetcher.length = batches


def make_last_batch(trainer: Trainer) -> None:
    """End this epoch with the batch that has just begun, as where a loader without a length runs dry behind it."""
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def has_run_dry(trainer: Trainer) -> bool:
    """Of a loader without a length: whether nothing comes any more, also of what was fetched ahead."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return not getattr(fetcher, "batches", True)


def align_logged_step(trainer: Trainer) -> None:
    """Set the loggers' step counter to the optimizer-step count.

    Lightning keeps them apart and adds one on some resumes (a save in mid-window counts as a step), which moves the
    logging interval and the x axis of every later point.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def begin_epoch_anew_if_full(trainer: Trainer) -> None:
    """Where a fit goes on from the end of an epoch, begin the next with none of its batches.

    Lightning does so for a checkpoint that was written within the last batch. With one that was written when a fit had
    ended there, its count is that of a whole epoch: it takes one batch more, as the last of an epoch, and steps on it.
    """
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.current.completed >= trainer.num_training_batches:
        loop.batch_progress.reset_on_run()
        loop.scheduler_progress.reset_on_run()
        loop.automatic_optimization.optim_progress.reset_on_run()


def replay_window(trainer: Trainer, batches: int) -> None:
    """Where a fit goes on within an accumulation window, take Lightning's counters back to where the window began.

    They count the window's ``batches`` as run, but their gradients are gone: the epoch would end so many batches early.
    What the loop has made of the moment of the save is forgotten with them; without it, the loop counts the step before
    the window once more for the loggers.
    """
    loop = trainer.fit_loop.epoch_loop
    for tracker in (loop.batch_progress.total, loop.batch_progress.current):
        begun = tracker.ready - batches
        tracker.ready = tracker.started = tracker.processed = tracker.completed = begun  # type: ignore[attr-defined]
    loop.batch_progress.is_last_batch = False
    loop.reset_restart_stage()
    loop.val_loop.reset_restart_stage()
    loop._batches_that_stepped -= 1


def validate_by_clock(trainer: Trainer) -> None:
    """Where a trainer validates by the clock, let the time be up; nothing happens where it does not.

    It is asked for as ``Trainer(val_check_interval="00:00:30:00")``, from Lightning 2.6 on.
    """
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        trainer._last_val_time = -math.inf  # type: ignore[attr-defined]


def validate_first(trainer: Trainer, step: int, ask: Callable[[], None]) -> None:
    """Let a fit that goes on begin with the validation that follows the step before, logged at ``step``.

    Lightning's loop takes a batch, and asks then whether to validate: the first time it takes none, and ``ask`` is
    called instead. It comes back so by itself from a save within a validation alone, counts the step for the loggers
    once more before it, and leaves out the batches that were validated on.
    """
    loop: Any = trainer.fit_loop.epoch_loop

    def take_no_batch(*fetcher: Any) -> None:
        loop.val_loop.restarting = False
        loop._batches_that_stepped = step
        loop._should_accumulate = lambda: False  # Lightning's count of batches may have begun anew
        loop.advance = go_on
        ask()

    def go_on(*fetcher: Any) -> None:
        forget_validation_first(trainer)
        loop.advance(*fetcher)

    loop.advance = take_no_batch


def forget_validation_first(trainer: Trainer) -> None:
    """Undo :func:`validate_first`; nothing happens where nothing was asked."""
    for name in ("advance", "_should_accumulate"):
        trainer.fit_loop.epoch_loop.__dict__.pop(name, None)


def last_logged(trainer: Trainer) -> dict[str, tuple[tuple[str, ...], Tensor]]:
    """By hook and name, the names and the value that ``log`` was last called with in training in this epoch.

    Each call makes a tensor of its own. The public ``callback_metrics`` has the values of earlier steps beside those of
    this one, and makes a new tensor of each whenever it is asked.
    """
    return {
        key: (tuple({metric.meta.name: 0, metric.meta.forked_name(True): 0}), metric._forward_cache)
        for key, metric in trainer.fit_loop.epoch_loop._results.items()
        if not metric.has_reset and isinstance(metric._forward_cache, Tensor)
    }


def collective_timeout(trainer: Trainer) -> timedelta | None:
    """How long a collective may take under the trainer's strategy; ``None``: torch's default."""
    return getattr(trainer.strategy, "_timeout", None)


def device_mesh(trainer: Trainer) -> Any:
    """The mesh of a strategy that has one; ``None`` for others, and until the processes are up: the public one raises.

    By capability, not by class: ``isinstance`` is False across ``lightning.pytorch`` and ``pytorch_lightning``.
    """
    return getattr(trainer.strategy, "_device_mesh", None)


def divert_step_metrics(trainer: Trainer, instead: Callable[[dict[str, Any]], None]) -> None:
    """Hand the metrics of a training step to ``instead``, when Lightning would read each of them for the loggers.

    Lightning still judges whether the step is logged, and computes what is. Both methods are shadowed on the connector;
    :func:`restore_step_metrics` takes the shadow away.
    """
    connector: Any = trainer._logger_connector
    update = connector.update_train_step_metrics

    def update_train_step_metrics() -> None:
        connector.log_metrics = instead
        try:
            update()
        finally:
            del connector.log_metrics

    connector.update_train_step_metrics = update_train_step_metrics


def restore_step_metrics(trainer: Trainer) -> None:
    """Undo :func:`divert_step_metrics`."""
    trainer._logger_connector.__dict__.pop("update_train_step_metrics", None)


def after_batch_end(trainer: Trainer, function: Callable[[], None]) -> None:
    """Call ``function`` once, behind every ``on_train_batch_end`` of the batch that ends, the LightningModule's too.

    A save in a callback's hook lacks what those behind it do in theirs, as the update of an average of the weights; and
    a fit that goes on from it does not make up for it. Lightning then tells its connector that the batch has ended,
    and counts the batch after that, so that what is saved is as in the hook. Several functions are called in order.
    """
    connector: Any = trainer._logger_connector
    end = connector.on_batch_end

    def on_batch_end() -> None:
        forget_batch_end(trainer)
        end()
        function()

    connector.on_batch_end = on_batch_end


def forget_batch_end(trainer: Trainer) -> None:
    """Undo :func:`after_batch_end` where its time has not come; nothing happens where nothing was asked."""
    trainer._logger_connector.__dict__.pop("on_batch_end", None)


def after_signal_registration(trainer: Trainer, install: Callable[[], None]) -> None:
    """Call ``install`` right after Lightning has put its own signal handlers in place.

    It does so between the last hook before training and the start of the data workers: no public hook lies there. Its
    SIGTERM handler broadcasts a device tensor from inside the handler, which can deadlock.
    """
    register = type(trainer._signal_connector).register_signal_handlers

    def register_then_install() -> None:
        register(trainer._signal_connector)
        install()

    trainer._signal_connector.register_signal_handlers = register_then_install  # type: ignore[method-assign]


def restore_signal_registration(trainer: Trainer) -> None:
    """Undo :func:`after_signal_registration`."""
    trainer._signal_connector.__dict__.pop("register_signal_handlers", None)


def requeue_signal(trainer: Trainer) -> int | None:
    """The signal on which Lightning saves in mid-step and has Slurm queue the job anew; ``None``: on none."""
    environment = trainer._accelerator_connector.cluster_environment
    if not getattr(environment, "auto_requeue", False):
        return None
    number = getattr(environment, "requeue_signal", None)
    return None if number is None else int(number)


def silence_sigterm_broadcast(trainer: Trainer) -> None:
    """Replace Lightning's SIGTERM check, which broadcasts a device tensor and reads it on the host per micro-batch.

    With it, no run on more than one device is free of host syncs. ``GracefulStop`` agrees over a CPU group instead.
    The method is shadowed on the loop object; :func:`restore_sigterm_broadcast` takes the shadow away.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def watch_sigterm_broadcast(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> bool:
    """Call ``before`` and ``after`` around that check, in which every rank waits for the others; False: there is none.

    There is none in older versions of Lightning, nor where :func:`silence_sigterm_broadcast` was called.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if not hasattr(loop, "_broadcast_sigterm_tensor") or "_broadcast_sigterm_tensor" in loop.__dict__:
        return False
    check = loop._broadcast_sigterm_tensor

    def watched() -> None:
        before()
        check()
        after()

    loop._broadcast_sigterm_tensor = watched
    return True


def restore_sigterm_broadcast(trainer: Trainer) -> None:
    """Undo :func:`silence_sigterm_broadcast` and :func:`watch_sigterm_broadcast`."""
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def compiled_graphs() -> int:
    """Graphs that ``torch.compile`` has built in this process so far; 0 where it was never used.

    Torch tells of a recompilation in a log that is off, and of giving up not at all.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it costs a second
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def saves_shards(trainer: Trainer) -> bool:
    """Whether FSDP1, FSDP2 or Lightning's ``ModelParallelStrategy`` has each rank write its part of a checkpoint."""
    strategy: Any = trainer.strategy
    kind = getattr(strategy, "_state_dict_type", None)  # FSDP1
    return kind == "sharded" or bool(getattr(strategy, "_save_distributed_checkpoint", False))
