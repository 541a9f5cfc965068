"""Programs that take turns on one device, so that whatever the machine does besides strikes all alike."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, Trainer

from lit_stable.cli.command import Command
from lit_stable.cli.lightning_cli import LitStableCLI
from lit_stable.cli.recipe import expand_arguments

NEVER = 1_000_000


class Contender(Protocol):
    """Trains a few steps whenever it is its turn."""

    def turn(self) -> float:
        """Seconds per step."""
        ...


def set_up() -> None:
    """Print tables alone."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Built(LitStableCLI):
    """Everything that `lit-stable fit` builds, and nothing run."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def build(configs: list[str], root: str, **options: Any) -> Built:
    """What recipes and options say, with nothing that would end or interrupt a run."""
    settled = {
        **{"run.root": root, "data.tokenizer": "bytes", "data.num_workers": 0, "trainer.devices": 1},
        **{"checkpoints.first_step": "null", "checkpoints.every_steps": NEVER, "validate_every": NEVER},
        **{"trainer.num_sanity_val_steps": 0, "trainer.max_steps": NEVER},
        **options,
    }
    typed = [word for config in configs for word in ("--config", config)]
    typed += [word for key, value in settled.items() for word in (f"--{key}", str(value))]
    return Built(Command("fit", typed, *expand_arguments(typed)))


class Stopwatch(Callback):
    """Times some steps behind some that do not count, and ends the fit after them. Stands last in the list."""

    def __init__(self, uncounted: int, counted: int) -> None:
        self.uncounted, self.counted = uncounted, counted
        self.seconds = 0.0  # per step
        self._first = self._seen = 0
        self._since = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._first = self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self._seen:  # in mid-window
            return
        self._seen = trainer.global_step
        if self._seen == self._first + self.uncounted:
            self._since = now()
        elif self._seen == self._first + self.uncounted + self.counted:
            self.seconds = (now() - self._since) / self.counted
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # or Lightning validates before it stops


class Variant:
    """A Trainer that trains a few steps whenever it is its turn."""

    def __init__(self, trainer: Trainer, module: Any, data: Any, stopwatch: Stopwatch) -> None:
        self.trainer, self.module, self.data, self.stopwatch = trainer, module, data, stopwatch
        self._validates = trainer.limit_val_batches
        trainer.strategy.teardown = lambda: None  # it would move the model to the host after every turn

    def turn(self) -> float:
        """Seconds per step."""
        self.trainer.should_stop = False
        self.trainer.limit_val_batches = self._validates
        self.trainer.fit(self.module, datamodule=self.data)
        return self.stopwatch.seconds


def now() -> float:
    """The time when all that was queued is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turns(found: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each contender in each round; every other round goes backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds):
        for name in list(found)[:: -1 if number % 2 else 1]:
            seconds[name].append(found[name].turn())
    return seconds


def ratios(seconds: dict[str, list[float]], name: str, to: str) -> tuple[float, float, float]:
    """How many times as fast as another one, in the same round: median, least, most."""
    found = [theirs / mine for mine, theirs in zip(seconds[name], seconds[to], strict=True)]
    return statistics.median(found), min(found), max(found)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
