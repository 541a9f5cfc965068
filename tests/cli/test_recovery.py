"""The ladder on the command line: through a rewind, a restart, a stop, and what is left in the run's folder."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_recipe import Done, command, losses, write_recipe

from lit_stable.callbacks.recovery_ledger import FILE, read_ledger
from lit_stable.callbacks.recovery_remedies import Remedies
from lit_stable.run.poisoned_samples import PoisonedSamples

DRILL = {"class_path": "lit_stable.run.poisoned_samples.PoisonedSamples", "init_args": {"first": 33, "last": 34}}
RUNGS = [{"do": "rewind", "before": 0, "after": 1, "max_times": 2}, {"do": "stop"}]


def recipe(folder: Path, **recovery: Any) -> Path:
    """14 steps of 4 samples; step 9 reads the poisoned ones. Saved are steps 2, 4, 8 and 12."""
    options = {"rungs": RUNGS, "triggers": {"not_finite": "rewind"}, **recovery}
    stability = {"recovery": options, "extra": {"drill": DRILL}}
    return write_recipe(folder, stability=stability, trainer__max_steps=14, validate_every=7)


def fit(path: Path, *words: str) -> Done:
    return command("fit", "--config", path, "--run.name", "r", *words)


@pytest.fixture(scope="module")
def rescued(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    folder = tmp_path_factory.mktemp("rescued")
    return fit(recipe(folder)), folder / "runs" / "r" / "0001"


def test_it_steps_back_and_comes_to_the_end(rescued: tuple[Done, Path]) -> None:
    done, folder = rescued
    assert done.code == 0, done.err
    (rewind,) = [e for e in read_ledger(folder / FILE) if e.action == "rewind"]
    assert (rewind.step, rewind.done["to"], rewind.done["dropped"]) == (9, 8, [[32, 40]])
    assert re.search(r"^steps +14 \(0 skipped\)", done.out, re.MULTILINE)
    assert "nan" not in losses(folder)[14]


def test_the_folder_is_held_until_the_command_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "r" / "0001"
    ask = "import sys, pathlib; from lit_stable.run.under_way import is_free; print(is_free(pathlib.Path(sys.argv[1])))"
    found = []

    def another_process_asks(*args: object, **stage: object) -> None:
        found.append(subprocess.run([sys.executable, "-c", ask, run], capture_output=True, text=True).stdout.strip())

    monkeypatch.setattr(PoisonedSamples, "on_exception", another_process_asks)
    monkeypatch.setattr(PoisonedSamples, "teardown", another_process_asks)
    assert fit(recipe(tmp_path)).code == 0
    another_process_asks()
    assert found == ["False", "False", "True"]  # at the rewind, at the end of the last fit, after it


def test_each_fit_has_its_own_log(rescued: tuple[Done, Path]) -> None:
    _, folder = rescued
    names = {path.name for path in folder.iterdir()}
    assert {"csv-01", "csv-02", "start-01.txt", "start-02.txt", "recipe-02.yaml", FILE} <= names
    steps = [[float(row["step"]) for row in _rows(folder / f"csv-0{n}")] for n in (1, 2)]
    assert (steps[0][-1], steps[1][0]) == (8, 9), "what the first has logged is not written over"


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_healthy_checkpoints_outlive_the_last(rescued: tuple[Done, Path]) -> None:
    _, folder = rescued
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert {"step-00000008.ckpt", "step-00000012.ckpt", "step-00000014.ckpt"} <= set(kept)


def test_a_restart_comes_to_the_same_and_says_so_by_its_exit_code(rescued: tuple[Done, Path], tmp_path: Path) -> None:
    path = recipe(tmp_path, restart=True)
    first = fit(path, "--resume", "auto")
    assert first.code == 75
    assert "step 9: rewinding to step 8" in first.err
    assert fit(path, "--resume", "auto").code == 0
    folder = tmp_path / "runs" / "r" / "0001"
    assert losses(folder) == losses(rescued[1])


def test_a_sigterm_in_the_step_that_steps_back_is_not_lost_to_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_back = Remedies._rewind

    def asked_to_stop(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return step_back(*args)

    monkeypatch.setattr(Remedies, "_rewind", asked_to_stop)
    first = fit(recipe(tmp_path, restart=True))
    assert first.code == 143
    assert "step 9: rewinding to step 8" in first.err


def test_the_end_of_the_ladder_has_an_exit_code_and_holds(tmp_path: Path) -> None:
    rungs = [{**RUNGS[0], "drop": False}, {"do": "stop"}]
    path = recipe(tmp_path, rungs=rungs)
    stopped = fit(path)
    assert stopped.code == 3
    assert "lit-stable fit: step 9: not finite: " in stopped.err
    assert f"the ledger is {tmp_path / 'runs' / 'r' / '0001' / FILE}" in stopped.err
    again = fit(path, "--resume", "auto")
    assert again.code == 3
    assert "--stability.recovery.after_stop go_on" in again.err


def test_off_and_on_in_a_healthy_run_are_the_same_bits(tmp_path: Path) -> None:
    healthy = {"drill": None}
    with_it = write_recipe(tmp_path, "a.yaml", stability={"recovery": {}, "extra": healthy})
    without = write_recipe(tmp_path, "b.yaml", stability={"extra": healthy})
    assert [command("fit", "--config", path).code for path in (with_it, without)] == [0, 0]
    assert losses(tmp_path / "runs" / "a" / "0001") == losses(tmp_path / "runs" / "b" / "0001")


def test_what_is_wrong_with_a_ladder_is_said_before_anything_runs(tmp_path: Path) -> None:
    done = fit(recipe(tmp_path, rungs=[{"do": "lr"}, {"do": "stop", "steps": 5}]))
    assert done.code == 2
    assert "rung 1: factor=1.0: cuts nothing" in done.err
    assert "rung 2: steps=5: means nothing on a stop" in done.err
