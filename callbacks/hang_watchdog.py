"""Where every thread stands when nothing moves any more."""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .base import MisconfigurationException, StabilityCallback
from .events import Event, Events, emit
from .progress import Progress

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class HangWatchdog(StabilityCallback):
    """Write down the stacks of all threads when no step has ended for a while; training is not touched.

    A run that hangs says nothing: one rank waits for a collective that another never calls. Here every rank watches
    itself from a thread of its own, so the files of all ranks together show which one stands elsewhere. A sign of life
    is the end of a micro-batch, of a validation batch, or the beginning of a save. It is told after ``seconds``, and
    if nothing moves again after 2, 4, 8 times as long.

    The stacks go to ``hang-rankN.txt`` in the folder of the run's events, appended, and to standard error; an event
    ``hang`` of that rank alone names host, seconds and file. A hang inside C code that holds Python's lock cannot be
    written down by a thread of Python.

    Nothing is logged.

    Args:
        seconds: Without a sign of life, > 0. Longer than the longest save, compilation, or start of data workers.

    Raises:
        MisconfigurationException: when ``seconds`` is not above 0.

    Example::

        >>> Trainer(callbacks=[HangWatchdog(seconds=900)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 96

    def __init__(self, seconds: float = 1800.0) -> None:
        if not seconds > 0:
            raise MisconfigurationException(f"`HangWatchdog(seconds={seconds})`: must be above 0.")
        self.seconds = seconds
        self._life = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Progress.of(trainer)
            Events.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        self._alive()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(trainer,), name="hang-watchdog", daemon=True)
        self._thread.start()

    def _alive(self, *ignored: Any, **named: Any) -> None:
        self._life = time.monotonic()

    on_train_batch_end = _alive
    on_validation_start = _alive
    on_validation_batch_end = _alive
    on_save_checkpoint = _alive

    def _watch(self, trainer: Trainer) -> None:
        patience, life = self.seconds, self._life
        while not self._stop.wait(max(0.0, self._life + patience - time.monotonic())):
            if self._life != life:
                patience, life = self.seconds, self._life
            silent = time.monotonic() - life
            if silent >= patience:
                self._tell(trainer, silent)
                patience *= 2

    def _tell(self, trainer: Trainer, silent: float) -> None:
        rank = trainer.global_rank
        text = f"rank {rank}, {socket.gethostname()}: no sign of life for {silent:.0f} s\n\n{stacks()}\n"
        print(text, file=sys.stderr, flush=True)
        path = (Events.of(trainer).folder or Path(trainer.default_root_dir)) / f"hang-rank{rank}.txt"
        written: str | None = str(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(text)
        except OSError:
            written = None
        evidence = {"seconds": silent, "host": socket.gethostname(), "file": written}
        emit(trainer, Event(Progress.of(trainer).steps + 1, "hang", evidence, rank=rank))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)
        self._thread = None


def stacks() -> str:
    """The stack of every Python thread of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != threading.get_ident()
    ]
    return "\n".join(parts)
