"""A recipe that trains in a second on generated text, and the command line in this process and in one of its own."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import logging
import os
import random
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import yaml
from forked import CONTEXT, start_process
from lightning_utilities.core import rank_zero as messages

from lit_stable.cli.lightning_cli import LitStableCLI
from lit_stable.cli.main import run
from lit_stable.data.prepare import prepare

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 6
WORDS = "the of and a to in is it you that he was for on are with as his they be at one have this"
RECIPE: dict[str, Any] = {
    "model": {
        "gpt": {"vocab_size": 257, "n_layer": 1, "n_head": 2, "d_model": 16, "max_length": 32},
        "schedule": {"peak": 0.01, "warmup": 2, "horizon": 100, "floor": 0.001},
    },
    "data": {
        "sequence_length": 32,
        "micro_batch": 2,
        "global_batch": 4,
        "validation_windows": 4,
        "num_workers": 0,
    },
    "trainer": {"max_steps": STEPS, "log_every_n_steps": 1, "accelerator": "cpu", "devices": 1},
    "validate_every": 3,
    "checkpoints": {"every_steps": 4, "first_step": 2},
    "stability": {"grad_clip": {"max_norm": 1.0}},
}


def write_store(folder: Path) -> Path:
    """A prepared folder of 120 short documents of real words, as bytes; written once per ``folder``."""
    store = folder / "store"
    if not store.exists():
        source = random.Random(0)
        documents = [" ".join(source.choices(WORDS.split(), k=40)) for _ in range(120)]
        (folder / "text.txt").write_text("\n\n".join(documents))
        prepare([folder / "text.txt"], store, "bytes", 0.1, "\n\n", report=lambda line: None)
    return store


def write_recipe(folder: Path, name: str = "tiny.yaml", **changes: Any) -> Path:
    """The recipe above in a file; ``model__gpt__n_layer=2`` changes a key, ``...=None`` makes it null."""
    recipe = copy.deepcopy(RECIPE)
    recipe["data"]["sources"] = {"text": {"path": str(write_store(folder))}}
    recipe["run"] = {"root": str(folder / "runs")}
    for key, value in changes.items():
        *groups, last = key.split("__")
        below = recipe
        for group in groups:
            below = below.setdefault(group, {})
        below[last] = value
    path = folder / name
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


@dataclass
class Done:
    """What a command came to; ``out`` also holds what callbacks say through Lightning's log."""

    code: int
    out: str
    err: str


_make_parser = LitStableCLI.setup_parser
_MADE: dict[Any, dict[str, Any]] = {}


def _setup_parser(self: LitStableCLI, *options: Any) -> None:
    """What the CLI has of its parser, made once for each command and system: parsing leaves it as it was."""
    key = (type(self), self.command.name, self._model_class, self._datamodule_class)
    before = set(vars(self))
    if key not in _MADE:
        _make_parser(self, *options)
        _MADE[key] = {name: value for name, value in vars(self).items() if name not in before}
    vars(self).update(_MADE[key])


def command(*words: str | Path, out: TextIO | None = None, err: TextIO | None = None) -> Done:
    """Run ``lit-stable WORDS`` in this process; what it says goes to the streams given, or into the result."""
    out, err = out or io.StringIO(), err or io.StringIO()
    log = logging.StreamHandler(out)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    elsewhere, messages.log = messages.log, logger  # a test that imports `pytorch_lightning` turns them that way
    try:
        kept = patch.object(LitStableCLI, "setup_parser", _setup_parser)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), kept:
            code = run([str(word) for word in words])
    finally:
        messages.log = elsewhere
        logger.removeHandler(log)
        logger.setLevel(level)
    return Done(code, *(s.getvalue() if isinstance(s, io.StringIO) else "" for s in (out, err)))


class Started:
    """A process under way; ``stdout`` is a pipe of what it says on both streams."""

    def __init__(self, process: Any, pipe: int) -> None:
        self.process, self.pid, self.stdout = process, process.pid, os.fdopen(pipe, "rb")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        self.process.join()
        code: int = self.process.exitcode
        return code


def start(*words: str | Path) -> Started:
    """Start ``lit-stable WORDS`` as a process of its own."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = start_process(_run_into, theirs, [str(word) for word in words])
    theirs.close()
    return Started(process, os.dup(ours.fileno()))


def _run_into(pipe: Connection, words: list[str]) -> None:
    os.dup2(pipe.fileno(), 1)
    os.dup2(pipe.fileno(), 2)
    pipe.close()
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.exit(command(*words, out=sys.stdout, err=sys.stderr).code)


def signal_at_line(process: Started, number: signal.Signals, beginning: str) -> Done:
    """Send a signal when the process prints a line that begins so, and wait for its end."""
    out = b""
    with process.stdout as pipe:
        for line in pipe:
            out += line
            if line.startswith(beginning.encode()):
                process.send_signal(number)
                break
        else:
            raise AssertionError(out.decode())
        if number == signal.SIGKILL:
            code = process.wait()
            os.set_blocking(pipe.fileno(), False)  # its data worker lives on for seconds and keeps the pipe open
            return Done(code, (out + (pipe.read() or b"")).decode(), "")
        out += pipe.read()
    return Done(process.wait(), out.decode(), "")


def losses(folder: Path) -> dict[int, str]:
    """Training loss by step, as text, from all CSV logs of a run folder; the latest session wins."""
    found: dict[int, str] = {}
    for path in sorted(folder.glob("csv-*/metrics.csv")):
        with path.open() as file:
            rows = csv.DictReader(file)
            found.update({int(float(row["step"])): row["train/loss"] for row in rows if row["train/loss"]})
    return found
