"""How far a replay is on its way to the step that is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_stable.callbacks import Progress
from lit_stable.run.console import say

#: Between two lines.
SECONDS = 10.0


class Way(Callback):
    """Says how many steps lie ahead before the first is taken, and now and then how many are left.

    Args:
        name: Stands in front, as ``replay 1 of 2``.
        origin: Where it begins, in words.
        step: The optimizer step asked for, counted from 1.
        clock: Seconds.
    """

    def __init__(self, name: str, origin: str, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._origin, self._step, self._clock = name, origin, step, clock
        self._seen = 0
        self._first: tuple[int, float] | None = None  # a step, and when it had been taken
        self._told = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen = Progress.of(trainer).steps
        ahead = self._step - self._seen
        steps = f"{ahead} steps, {self._seen + 1} to {self._step}" if ahead > 1 else f"step {self._step} alone"
        say(f"{self._name}: {steps}, from {self._origin}")
        self._first, self._told = None, self._clock()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        steps = Progress.of(trainer).steps
        if steps == self._seen:  # within a window
            return
        self._seen, now = steps, self._clock()
        if self._first is None:  # what it took has little to do with the others: something is compiled in it
            self._first = steps, now
        if now - self._told < SECONDS or steps >= self._step:
            return
        self._told = now
        taken, since = steps - self._first[0], now - self._first[1]
        left = f", about {since / taken * (self._step - steps):.0f} s left" if taken else ""
        say(f"{self._name}: step {steps}/{self._step}{left}")
