"""Stop on Ctrl-C or SIGTERM at a step boundary, with one checkpoint, on all ranks together."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from .base import StabilityCallback, rank_zero_info
from .private_names import restore_sigterm_broadcast, silence_sigterm_broadcast
from .progress import Progress

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GracefulStop(StabilityCallback):
    """On SIGINT or SIGTERM finish the optimizer step, write one checkpoint and end the fit; a second SIGINT ends now.

    Ranks may get the signal at different moments, or only one of them may: after every optimizer step they agree over
    a CPU process group (gloo), so that no rank waits for another in a collective and the device is never read.
    Lightning's own check, a device broadcast read on the host for every micro-batch, is switched off meanwhile.

    The checkpoint is written by the first checkpoint callback that has ``save_now(trainer)``, else to
    ``stopped-step=N.ckpt`` under ``dirpath``. The process should then exit with ``128 + signal`` (130 or 143), so that
    a launcher does not take the run as finished: ``signal`` says which one it was.

    Args:
        dirpath: Folder of the checkpoint when no callback offers to write it; ``None``: the trainer's root folder.

    Attributes:
        signal: Number of the signal that stopped the run, or ``None``.

    Example::

        >>> Trainer(callbacks=[GracefulStop()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 95

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.signal: int | None = None
        self._received = 0
        self._previous: dict[int, Any] = {}
        self._group: Any = None
        self._steps = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signal, self._received = None, 0
        self._steps = Progress.of(trainer).steps
        silence_sigterm_broadcast(trainer)
        if threading.current_thread() is threading.main_thread():  # Python takes handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._received == signal.SIGINT == number:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt
        self._received = self._received or number

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        progress = Progress.of(trainer)
        if progress.steps == self._steps:  # not at a step boundary
            return
        self._steps = progress.steps
        received = self._agreed()
        if not received or self.signal:
            return
        self.signal = received
        name = signal.Signals(received).name
        rank_zero_info(f"{name} received: writing a checkpoint after step {progress.steps}, then stopping.")
        self._save(trainer, progress.steps)
        trainer.should_stop = True

    def _agreed(self) -> int:
        if self._group is None:
            return self._received
        flag = torch.tensor([self._received])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return int(flag.item())

    def _save(self, trainer: Trainer, step: int) -> None:
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "save_now"):
                callback.save_now(trainer)
                return
        trainer.save_checkpoint(os.path.join(self.dirpath or trainer.default_root_dir, f"stopped-step={step}.ckpt"))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        restore_sigterm_broadcast(trainer)
        self._group = None
