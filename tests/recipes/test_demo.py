"""`demo/rescue` as README has it, with the drill ten times sooner: the rescue, the death without it, the control."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny_recipe import Done, command, losses, write_store

from lit_stable.callbacks.recovery_ledger import FILE, Entry, read_ledger

SOONER = {
    **{"stability.extra.drill.init_args.first": 160, "stability.extra.drill.init_args.last": 183},  # steps 21 to 23
    **{"trainer.max_steps": 30, "trainer.log_every_n_steps": 1, "validate_every": 30, "data.validation_windows": 8},
    "checkpoints.every_steps": 5,
}


def fit(folder: Path, name: str, *words: str) -> tuple[Done, Path]:
    options = [word for key, value in SOONER.items() for word in (f"--{key}", str(value))]
    text = ["--data.sources", f"{{text: {{path: {write_store(folder)}}}}}"]
    done = command("fit", "--config", "demo/rescue", *words, "--run.root", folder, "--run.name", name, *text, *options)
    return done, folder / name / "0001"


def rewinds(folder: Path) -> list[Entry]:
    return [entry for entry in read_ledger(folder / FILE) if entry.action == "rewind"]


@pytest.mark.filterwarnings("ignore:Recovery")
def test_it_lives_with_the_ladder_dies_without_and_stops_where_it_reads_the_same_data_again(tmp_path: Path) -> None:
    done, folder = fit(tmp_path, "rescued")
    assert done.code == 0
    (rewind,) = rewinds(folder)
    assert (rewind.step, rewind.done["to"], rewind.done["dropped"]) == (21, 10, [[80, 248]])
    assert math.isfinite(float(losses(folder)[30]))

    done, folder = fit(tmp_path, "dies", "--stability.recovery", "null")
    assert done.code == 0
    dead = [step for step, loss in losses(folder).items() if math.isnan(float(loss))]
    assert dead == list(range(22, 31)), "the loss of the step itself is told before it is spoilt"

    done, folder = fit(tmp_path, "control", "--config", "demo/rescue_control")
    assert done.code == 3
    assert [(entry.step, entry.done["to"]) for entry in rewinds(folder)] == [(21, 20), (21, 15), (21, 10)]
