"""The lives of two ranks that step back, and how they end; `restart_recovery.py` has a launcher start them.

A life ends because the ladder asks for a restart to step back, or by its fate: ``load``: rank 0 is killed within the
load of a rewind. ``term``: one rank gets SIGTERM within a step. ``stuck``: one rank stands still within a step, until
the other has waited for it for too long. ``kill``: one rank is killed at a random moment, see ``kill_recovery``. Each
is written down in ``deaths.jsonl`` before it comes; the last life has none.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from kill_recovery import Moments
from lightning.pytorch.strategies import DDPStrategy
from rank_scenarios_recovery import ONE_RANK, STEPS, judged
from recovery_project import RUNGS, Data, Module, make_trainer

from lit_stable.callbacks import Events, GracefulStop, HangWatchdog, Recovery, fit_with_recovery
from lit_stable.callbacks.branch_end import pending_target
from lit_stable.callbacks.recovery_exit import Rewind

DEATHS = "deaths.jsonl"
FIRST_FATES = ["load", "term", "stuck"]
#: Moments among which a kill is drawn, by rank: about those of a life between two rewinds.
MOMENTS = (100, 25)


class Reader(Module):
    """Writes down what each step reads, at once; ``before_step`` holds by step of this life what comes before it."""

    def __init__(self, log: Path) -> None:
        super().__init__(ONE_RANK)
        self.log_path = log
        self.taken, self.before_step = 0, dict[int, Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.taken += 1
        self.before_step.get(self.taken, lambda: None)()
        loss = super().training_step(batch, batch_idx)
        step = self.trainer.global_step + 1
        with self.log_path.open("a") as file:
            file.write(json.dumps([step, self.ids[step]]) + "\n")
        return loss


def deaths(folder: Path) -> list[list[Any]]:
    path = folder / DEATHS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Fate:
    """What ends the life at hand; the same on both ranks."""

    def __init__(self, folder: Path, run: Path, wanted: int, seed: int) -> None:
        died = len(deaths(folder))
        self.folder, self.own = folder, int(os.environ["RANK"])
        self.kind = "" if died >= wanted else "kill" if died >= len(FIRST_FATES) else FIRST_FATES[died]
        draw = random.Random(f"{seed} {run.name} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
        self.rank = 0 if self.kind == "load" else draw.randrange(2)
        self.moment = draw.randint(1, MOMENTS[self.rank]) if self.kind == "kill" else draw.randint(2, 8)
        self.is_mine = self.own == self.rank

    def note(self) -> None:
        with (self.folder / DEATHS).open("a") as file:
            file.write(json.dumps([self.kind, self.rank]) + "\n")

    def die(self) -> None:
        self.note()
        os.kill(os.getpid(), signal.SIGKILL)

    def be_asked_to_stop(self) -> None:
        self.note()
        os.kill(os.getpid(), signal.SIGTERM)

    def stand_still(self) -> None:
        self.note()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or the launcher waits for half a minute before it kills
        time.sleep(3600)

    def prepare(self, module: Reader, run: Path) -> None:
        """Whatever is to come, on the rank to which it comes."""
        if not self.is_mine:
            return
        if self.kind == "load" and pending_target(run):
            load = torch.load
            torch.load = lambda *args, **kwargs: [load(*args, **kwargs), self.die()]
        elif self.kind == "kill":
            Moments(self.moment, self.die).install()
        elif self.kind in ("term", "stuck"):
            module.before_step[self.moment] = self.be_asked_to_stop if self.kind == "term" else self.stand_still


def live(folder: Path, run: Path, wanted: int, seed: int) -> None:
    """One life of one rank; the last one judges the run."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    fate = Fate(folder, run, wanted, seed)
    module = Reader(run / f"read-{fate.own}.jsonl")
    fate.prepare(module, run)
    channel, stop = Events(), GracefulStop()
    channel.folder = run
    # A rank that waits for one that is stuck may not wait for long.
    strategy = DDPStrategy(timeout=timedelta(seconds=6 if fate.kind == "stuck" else 60))
    recovery = Recovery(RUNGS, {"not_finite": "rewind"}, restart=True)
    others = (channel, stop, HangWatchdog(2.0))
    trainer = make_trainer(run, STEPS, *others, devices=2, strategy=strategy, recovery=recovery)
    try:
        fit_with_recovery(trainer, module, Data(), ckpt_path="auto")
    except Rewind as rewind:
        sys.exit(rewind.exit_code)
    if stop.signal:
        sys.exit(128 + stop.signal)
    read = dict(json.loads(line) for line in module.log_path.read_text().splitlines())
    found = judged(trainer, module, run, [read[step] for step in range(1, STEPS + 1)])
    if fate.own == 0:
        (run / "judged.json").write_text(json.dumps(found))
