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
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning_utilities.core import rank_zero as messages

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


def command(*words: str | Path) -> Done:
    """Run ``lit-stable WORDS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    log = logging.StreamHandler(out)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    elsewhere, messages.log = messages.log, logger  # a test that imports `pytorch_lightning` turns them that way
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([str(word) for word in words])
    finally:
        messages.log = elsewhere
        logger.removeHandler(log)
        logger.setLevel(level)
    return Done(code, out.getvalue(), err.getvalue())


def start(*words: str | Path) -> subprocess.Popen[bytes]:
    """Start ``lit-stable WORDS`` as a process of its own, stdout and stderr in one pipe."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "lit_stable", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def signal_at_line(process: subprocess.Popen[bytes], number: signal.Signals, beginning: str) -> Done:
    """Send a signal when the process prints a line that begins so, and wait for its end."""
    assert process.stdout is not None
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
            process.wait()
            os.set_blocking(pipe.fileno(), False)  # its data worker lives on for seconds and keeps the pipe open
        out += pipe.read() or b""
    return Done(process.wait(), out.decode(), "")


def losses(folder: Path) -> dict[int, str]:
    """Training loss by step, as text, from all CSV logs of a run folder; the latest session wins."""
    found: dict[int, str] = {}
    for path in sorted(folder.glob("csv-*/metrics.csv")):
        with path.open() as file:
            rows = csv.DictReader(file)
            found.update({int(float(row["step"])): row["train/loss"] for row in rows if row["train/loss"]})
    return found
