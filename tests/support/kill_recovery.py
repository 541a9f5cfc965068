"""Kill a run that steps back, again and again, at random moments, and see whether it comes to what it should.

Each life is a process of its own. It counts the moments at which something goes to disk,
comes from it or is trained on, and ends itself by SIGKILL at one of them, drawn at random: within a save, between a
ledger's line and what it announces, within a line, within the load of a rewind. The last life is not killed.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked import start_process
from recovery_project import Data, Module, clean_run, ids_by_the_ledger, make_trainer, poison

from lit_stable.callbacks import fit_with_recovery
from lit_stable.callbacks.recovery_ledger import FILE, read_ledger

STEPS = 34
POISON = poison(12, 13, 19)


class Reader(Module):
    """Writes down what each step reads, at once."""

    def __init__(self, log: Path) -> None:
        super().__init__(POISON)
        self.log_path = log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        step = max(self.ids)
        with self.log_path.open("a") as file:
            file.write(json.dumps([self.trainer.global_step + 1, self.ids.pop(step)]) + "\n")
        return loss


class Moments:
    """Counts the moments of a life, and ends it at one of them."""

    def __init__(self, last: int, end: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)) -> None:
        self.count, self.last, self.end = 0, last, end

    def pass_by(self) -> None:
        self.count += 1
        if self.count == self.last:
            self.end()

    def around(self, owner: Any, name: str) -> None:
        """Before and after each call."""
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.pass_by()
            result = function(*args, **kwargs)
            self.pass_by()
            return result

        setattr(owner, name, call)

    def within_writes(self) -> None:
        """With half of the bytes on disk."""
        write = os.write

        def halves(handle: int, data: bytes) -> int:
            written = write(handle, data[: len(data) // 2])
            self.pass_by()
            return written + write(handle, data[len(data) // 2 :])

        os.write = halves

    def install(self) -> None:
        self.around(os, "fsync")
        self.around(Path, "rename")
        self.around(Path, "replace")
        self.around(torch, "load")
        self.around(torch, "save")
        self.around(Module, "training_step")
        self.within_writes()


def live(folder: Path, last: int) -> Any:
    """One life: to the end, or to its moment."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    moments = Moments(last)
    moments.install()
    module = Reader(folder / "read.jsonl")
    fit_with_recovery(make_trainer(folder, STEPS), module, Data(), ckpt_path="auto")
    torch.save(module.state_dict(), folder / "weights.pt")
    (folder / "moments").write_text(str(moments.count))


def in_a_process_of_its_own(folder: Path, last: int) -> bool:
    """Whether the life came to its end by itself."""
    process = start_process(live, folder, last)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), "a life has failed; see above"
    return process.exitcode == 0


def read_last(folder: Path) -> list[list[int]]:
    """Of each step what its last try has read."""
    found = dict(json.loads(line) for line in (folder / "read.jsonl").read_text().splitlines())
    return [found[step] for step in range(1, STEPS + 1)]


def judge(folder: Path) -> dict[str, Any]:
    ids = ids_by_the_ledger(folder / FILE, 1, STEPS)
    weights = torch.load(folder / "weights.pt")
    clean = clean_run(folder / "clean", ids).state_dict()
    rewinds = [e for e in read_ledger(folder / FILE) if e.action == "rewind"]
    dropped = [p for e in rewinds for start, stop in e.done["dropped"] for p in range(start, stop)]
    flat = [i for step in ids for i in step]
    return {
        "rewinds": [[e.step, e.done["to"]] for e in rewinds],
        "dropped_twice": len(dropped) - len(set(dropped)),
        "read_twice": len(flat) - len(set(flat)),
        "reads_what_the_ledger_says": read_last(folder) == ids,
        "poison_read": len(POISON.intersection(flat)),
        "equals_the_clean_run": all(torch.equal(weights[name], clean[name]) for name in clean),
    }


def killed_again_and_again(folder: Path, kills: int, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a run came to that was not killed, and what those came to that were, so often in all."""
    draw = random.Random(seed)
    quiet = folder / "quiet"
    assert in_a_process_of_its_own(quiet, last=-1)
    moments = int((quiet / "moments").read_text())
    ended: list[dict[str, Any]] = []
    killed, deaths = folder / "killed", 0
    while deaths < kills:
        if in_a_process_of_its_own(killed, last=draw.randint(1, moments // 2)):
            ended.append(judge(killed))  # this run is through: another one
            killed = folder / f"killed-{len(ended)}"
        else:
            deaths += 1
    assert in_a_process_of_its_own(killed, last=-1)
    return judge(quiet), [*ended, judge(killed)]
