"""A fit that is killed again and again comes to the same losses as one that is not."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from tiny_recipe import command, losses, signal_at_line, start, write_recipe

STEPS = 14
#: Lines at which the process is killed: between two saves; when the save of step 8 has just begun, since a step's line
#: comes before its checkpoint; when the checkpoint of step 12 has just been published.
MOMENTS = ["step 3/", "step 8/", "saved step 12"]


def printed(out: str) -> dict[int, str]:
    """Loss, learning rate and gradient norm of each step as printed."""
    pattern = r"^step (\d+)/\d+ \| (loss \S+ \| lr \S+ \| grad norm \S+) "
    return {int(step): text for step, text in re.findall(pattern, out, re.MULTILINE)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Folders of an unkilled and of a killed run, and what each session of the killed one printed."""
    folder = tmp_path_factory.mktemp("kill")
    recipe = write_recipe(folder, trainer__max_steps=STEPS, model__gpt__dropout=0.1, data__num_workers=1)
    assert command("fit", "--config", recipe, "--run.name", "unkilled").code == 0
    words = ["fit", "--config", recipe, "--run.name", "killed", "--resume", "auto"]
    killed = folder / "runs" / "killed" / "0001"
    said = []
    for moment in MOMENTS:
        line = moment.replace("saved step 12", f"saved {killed / 'checkpoints' / 'step-00000012.ckpt'}")
        done = signal_at_line(start(*words), signal.SIGKILL, line)
        assert done.code == -signal.SIGKILL, done.out
        said.append(done.out)
    done = command(*words)
    assert done.code == 0, done.err
    return folder / "runs" / "unkilled" / "0001", killed, [*said, done.out]


def test_every_session_went_on_from_a_checkpoint_at_or_behind_the_kill(runs):
    _, _, said = runs
    assert "no run of 'killed' yet, starting one" in said[0]
    resumed = [int(re.search(r"going on with \S+step-(\d+)\.ckpt", text)[1]) for text in said[1:]]
    assert resumed[0] in (2, 3)  # the validation at step 3 writes one too
    assert resumed[1] in (6, 8)
    assert resumed[2] == 12


def test_what_all_sessions_printed_is_what_an_unkilled_run_prints(runs):
    unkilled, _, said = runs
    merged: dict[int, str] = {}
    for text in said:
        merged.update(printed(text))
    assert sorted(merged) == list(range(1, STEPS + 1))
    for step, loss in losses(unkilled).items():
        assert merged[step].startswith(f"loss {float(loss):.4f} ")


def test_the_logged_losses_are_those_of_an_unkilled_run_to_the_last_bit(runs):
    unkilled, killed, _ = runs
    expected, found = losses(unkilled), losses(killed)
    # Lightning hands the row of a step to the loggers after the step's checkpoint: a kill in between, at step 12, loses
    # the row (the line on the screen came before).
    assert set(expected) - set(found) <= {12}
    assert found == {step: loss for step, loss in expected.items() if step in found}


def test_the_final_weights_are_the_same(runs):
    unkilled, killed, _ = runs
    a, b = (
        torch.load(run / "checkpoints" / f"step-{STEPS:08d}.ckpt", weights_only=True)["state_dict"]
        for run in (unkilled, killed)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_no_half_written_checkpoint_is_left(runs):
    _, killed, _ = runs
    assert {path.name for path in (killed / "checkpoints").iterdir()} == {f"step-{STEPS:08d}.ckpt", "best.json"}
