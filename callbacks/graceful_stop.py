"""Stop on Ctrl-C, SIGTERM or a scheduler's notice at a step boundary, with one checkpoint, on all ranks together."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from .base import MisconfigurationException, StabilityCallback, rank_zero_info, refuse_all
from .early_end import EarlyEnd, save_now
from .host_agreement import HostAgreement
from .private_names import (
    after_batch_end,
    after_signal_registration,
    forget_batch_end,
    requeue_signal,
    restore_signal_registration,
    restore_sigterm_broadcast,
    silence_sigterm_broadcast,
    window_is_open,
)
from .recovery_exit import Rewind
from .stop_signals import number_of, wrong_with

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GracefulStop(StabilityCallback):
    """On SIGINT or SIGTERM finish the optimizer step, write one checkpoint and end the fit; a second SIGINT ends now.

    Ranks may get the signal at different moments, or only one of them may: after every optimizer step they agree over
    a CPU process group (gloo), so that no rank waits for another in a collective and the device is never read.
    Lightning's own check, a device broadcast read on the host for every micro-batch, is switched off meanwhile, and
    so is the validation with which Lightning ends a stopped run; ``min_steps`` and ``min_epochs`` do not hold it.
    A signal in the step at whose end :class:`~.recovery.Recovery` steps back is heeded after the first step from there,
    or, where it leaves the process for that, by the process's exit code: ``Rewind.exit_code``.
    Nothing is logged.

    The checkpoint is written behind every ``on_train_batch_end`` of the step, whoever's it is: by the first checkpoint
    callback that has ``save_now(trainer)``, else to ``stopped-step=N.ckpt`` under ``dirpath``. The process should then
    exit with ``128 + signal`` (130 or 143), so that a launcher does not take the run as finished: ``signal`` says which
    one it was.

    **Notice before a time limit.** A scheduler that is asked to sends a signal some time before it ends a job, as Slurm
    does with ``--signal=USR1@300``. Unless somebody heeds it, such a signal ends the process, without a checkpoint:
    name it in ``also``, and it stops the run as SIGTERM does (exit code 138 for SIGUSR1). Under Slurm Lightning itself
    requeues the job on SIGUSR1, from within the step; to name that signal here is refused, unless the trainer's plugin
    ``SLURMEnvironment(auto_requeue=False)`` leaves it to this callback.

    Args:
        dirpath: Folder of the checkpoint when no callback offers to write it; ``None``: the trainer's root folder.
        also: Names of further signals that stop the run as SIGTERM does, as ``SIGUSR1`` or ``USR1``.

    Attributes:
        signal: Number of the signal that stopped the run, or ``None``.

    Raises:
        MisconfigurationException: when ``also`` names a signal that is none, that no process can heed, that gives
            notice of something else, or on which Lightning requeues the job.

    Example::

        >>> Trainer(callbacks=[GracefulStop(also=["SIGUSR1"])], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 95

    def __init__(self, dirpath: str | None = None, also: list[str] | None = None) -> None:
        self.dirpath = dirpath
        self.also = list(also or [])
        refuse_all(f"`GracefulStop(also={self.also})`: {wrong}" for wrong in map(wrong_with, self.also) if wrong)
        self._heeded = dict.fromkeys((signal.SIGINT, signal.SIGTERM, *map(number_of, self.also)))
        self.signal: int | None = None
        self._received = self._left_over = 0
        self._interrupted = False
        self._previous: dict[int, Any] = {}
        self._end = EarlyEnd()
        self._ranks = HostAgreement()
        self._process = 0
        self._training = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._refuse_requeueing(trainer)
            self._ranks.open(trainer)
            # Later than here, where Lightning's own would come on top; earlier than the data workers, which a launcher
            # or a terminal signals too, and which inherit what stands then.
            after_signal_registration(trainer, self._install)

    def _refuse_requeueing(self, trainer: Trainer) -> None:
        taken = requeue_signal(trainer)
        if taken is not None and taken in map(number_of, self.also):
            raise MisconfigurationException(
                f"`GracefulStop(also={self.also})`: under Slurm Lightning requeues the job on"
                f" {signal.Signals(taken).name}; give the trainer the plugin SLURMEnvironment(auto_requeue=False), or"
                " leave it out here."
            )

    def _install(self) -> None:
        self.signal, self._interrupted = None, False
        self._received, self._left_over = self._left_over, 0
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():  # Python takes handlers nowhere else
            for number in self._heeded:
                self._previous[number] = signal.signal(number, self._on_signal)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training = True
        silence_sigterm_broadcast(trainer)

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a forked data worker: it ends when the trainer ends
            return
        if not self._training:  # nothing was trained, there is nothing to save
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        if number == signal.SIGINT:
            if self._interrupted:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                raise KeyboardInterrupt
            self._interrupted = True
        self._received = self._received or number

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if window_is_open(trainer):  # not at a step boundary
            return
        received = self._ranks.largest(self._received)
        if not received or self.signal:
            return
        self.signal = received
        name = signal.Signals(received).name
        rank_zero_info(f"{name} received: writing a checkpoint after step {trainer.global_step}, then stopping.")
        after_batch_end(trainer, lambda: self._save_and_end(trainer))

    def _save_and_end(self, trainer: Trainer) -> None:
        save_now(trainer, self.dirpath)
        self._end.end(trainer)

    def handle_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Rewind) and not self.signal:
            self._hand_over(exception)

    def _hand_over(self, rewind: Rewind) -> None:
        """What was received goes to the next fit, or by the exit code to whoever would start the process again."""
        # From here on a signal ends the process: the ledger knows how to go on. Lightning's handler must not come back
        # in between; it puts back itself what stood before the fit.
        self._training, self._previous = False, {}
        self._left_over = rewind.signal = self._ranks.largest(self._received)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            # Lightning has restored by now what it found before the fit; its own handler must not come back.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._previous = {}
        self._training = False
        restore_signal_registration(trainer)
        forget_batch_end(trainer)
        self._end.undo(trainer)
        restore_sigterm_broadcast(trainer)
        self._ranks.close()
