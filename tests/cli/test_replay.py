"""`lit-stable replay`: the step as it was, what differs, the module and the samples that stand out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from compilation_counts import count_compilations, stand_in
from tiny_recipe import command, write_recipe

from lit_stable.callbacks.control_orders import new_order, place
from lit_stable.replay import way

STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, saved after 2, 4 and 6, with dropout; the rate is halved from step 4 on."""
    folder = tmp_path_factory.mktemp("replay")
    kept = {"checkpoints": {"every_steps": 2, "first_step": 2, "keep_last": 9}, "model__gpt__dropout": 0.1}
    recipe = write_recipe(folder, **kept, stability__black_box={"steps": 4})
    first = command("fit", "--config", recipe, "--trainer.max_steps", "3")
    assert first.code == 0, first.err
    place(folder / "runs" / "tiny" / "0001", new_order("lr*=0.5"))
    again = command("fit", "--config", recipe, "--resume", "auto", "--trainer.max_steps", str(STEPS))
    assert again.code == 0, again.err
    return folder / "runs" / "tiny" / "0001"


def listing(run: Path) -> list[Path]:
    return sorted(p for p in run.rglob("*") if p.is_file())


def test_a_replay_is_the_same_to_the_bit_and_leaves_no_trace(run: Path, recwarn: pytest.WarningsRecorder) -> None:
    before = listing(run)
    done = command("replay", run, "--step", "6")
    lines = done.out.splitlines()
    assert done.code == 0, done.err
    assert not [w for w in recwarn if "need to be provided" in str(w.message)]  # what is left out on purpose
    page = lines[next(i for i, line in enumerate(lines) if line.startswith(f"{run}: step 6")) :]
    assert page[0] == f"{run}: step 6, 2 times from {run}/checkpoints/step-00000004.ckpt, by recipe-02.yaml"
    assert page[1] == "noise: none, replays are equal to the bit"
    assert page[2] == "same: steps 5 to 6, 2 logged, loss and gradient norm to the bit"
    assert page[3].startswith("step 6: loss ")
    assert page[4] == "outputs of all modules are finite, none above 10 times the usual"
    assert page[5] == "samples, worst first (4 of 4):"
    losses = [float(found[1]) for line in page if (found := re.match(r"  sample \d+: loss (\S+)$", line))]
    assert losses == sorted(losses, reverse=True)
    read = "".join(command("dump-batch", run, "--step", "6", "--text").out.split())
    texts = [text.partition("\n")[2] for text in "\n".join(page).split("\n  sample ")[1:]]
    assert all(len("".join(text.split())) > 20 and "".join(text.split()) in read for text in texts), (texts, read)
    assert sorted(re.findall(r"\n  sample (\d+)", "\n".join(page))) == ["20", "21", "22", "23"]
    assert listing(run) == before


def test_a_compiled_run_is_compared_compiled_and_looked_into_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = count_compilations(monkeypatch, stand_in)
    recipe = write_recipe(tmp_path, model__compile="on")
    assert command("fit", "--config", recipe, "--trainer.max_steps", "3").code == 0
    graphs.clear()
    torch._dynamo.reset()
    done = command("replay", tmp_path / "runs" / "tiny" / "0001", "--step", "3", "--worst", "1")
    assert done.code == 0, done.out + done.err
    assert graphs["residual"], "the replays compared are compiled"
    page = done.out.splitlines()
    same = page.index("same: steps 1 to 3, 3 logged, loss and gradient norm to the bit")
    assert page[same + 1] == "what follows is of one more replay, in which nothing was compiled"
    assert page[same + 3] == "outputs of all modules are finite, none above 10 times the usual"
    assert page[same + 4] == "samples, worst first (1 of 4):"


def test_it_begins_where_it_is_told_and_orders_hold_in_it(run: Path) -> None:
    done = command("replay", run, "--step", "6", "--at", f"{run}@2", "--worst", "0")
    assert (done.code, "same: steps 3 to 6, 4 logged" in done.out) == (0, True), done.out
    done = command("replay", run, "--step", "6", "--at", f"{run}@6")
    assert (done.code, "stands at step 6" in done.err) == (2, True)


def test_it_says_how_many_steps_lie_ahead_and_how_far_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "replay", run, "--step", "6", "--at", f"{run}@2", "--worst", "0"
    ahead = [f"replay {one} of 2: 4 steps, 3 to 6, from {run}/checkpoints/step-00000002.ckpt" for one in (1, 2)]
    quick = [line for line in command(*words).out.splitlines() if line.startswith("replay ")]
    assert quick == ahead
    monkeypatch.setattr(way, "SECONDS", 0.0)
    slow = [line.split(", about")[0] for line in command(*words).out.splitlines() if line.startswith("replay ")]
    steps = [[f"replay {one} of 2: step {step}/6" for step in (3, 4, 5)] for one in (1, 2)]
    assert slow == [ahead[0], *steps[0], ahead[1], *steps[1]]
    alone = command("replay", run, "--step", "5", "--worst", "0").out.splitlines()
    assert f"replay 1 of 2: step 5 alone, from {run}/checkpoints/step-00000004.ckpt" in alone


def test_of_a_branch_a_step_that_lies_before_it_is_replayed_as_its_parent_took_it(run: Path, tmp_path: Path) -> None:
    parent = tmp_path / "runs" / "tiny" / "0001"
    shutil.copytree(run, parent)
    words = ["--model.gpt.dropout", "0.0", "--run.name", "other", "--run.root", tmp_path / "runs"]
    recipe = parent / "recipe-02.yaml"
    words += ["--resume", "null"]
    branched = command("fit", "--config", recipe, "--ckpt_path", f"{parent}@4", "--trainer.max_steps", "5", *words)
    assert branched.code == 0, branched.err
    branch = tmp_path / "runs" / "other" / "0001"
    for step, begins, session in ((4, 3, 2), (3, 2, 1)):
        done = command("replay", branch, "--step", str(step), "--worst", "0")
        assert done.code == 0, done.out + done.err
        origin = f"{parent}/checkpoints/step-0000000{begins}.ckpt"
        assert f"{parent}: step {step}, 2 times from {origin}, by recipe-0{session}.yaml" in done.out
        assert f"same: steps {step} to {step}" in done.out
    assert f"{branch}: step 5, 2 times from {parent}/" in command("replay", branch, "--step", "5", "--worst", "0").out
    parent.rename(tmp_path / "gone")
    done = command("replay", branch, "--step", "4")
    assert (done.code, f"step=4: was taken before {branch} began, behind step 4, and the run" in done.err) == (2, True)


def test_without_a_checkpoint_it_begins_at_the_beginning(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "tiny" / "0001"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.ckpt"))
    done = command("replay", copy, "--step", "6", "--worst", "0")
    assert (done.code, "from the beginning" in done.out, "same: steps 1 to 6" in done.out) == (0, True, True), done.out


def test_what_the_run_computed_otherwise_is_told(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "tiny" / "0001"
    shutil.copytree(run, copy)
    log = copy / "csv-02" / "metrics.csv"
    lines = log.read_text().splitlines()
    column = lines[0].split(",").index("stability/grad_norm")
    cells = next(
        cells for line in lines[1:] if (cells := line.split(","))[lines[0].split(",").index("step")].startswith("5")
    )
    log.write_text(log.read_text().replace(cells[column], "0.75"))
    done = command("replay", copy, "--step", "5", "--worst", "0")
    assert done.code == 1
    assert "NOT the same: steps 5 to 5, 1 logged, 1 numbers differ" in done.out
    assert "  step 5: stability/grad_norm 0.75 in the log, " in done.out


def test_an_option_goes_over_the_recipe(run: Path) -> None:
    done = command("replay", run, "--step", "6", "--trainer.deterministic", "true", "--worst", "0")
    assert (done.code, "same:" in done.out) == (0, True), done.err
    assert command("replay", run, "--step", "6", "--model.gpt.dropout", "0.0", "--worst", "0").code == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--step", "0"], "step=0: optimizer steps count from 1"),
        (["--step", "6", "--runs", "1"], "runs=1: must be"),
        (
            ["--step", "6", "--trainer.max_steps", "3"],
            "step=6: was not taken again, for the replay took no step; leave out what ends it before, among"
            " --trainer.max_steps 3.",
        ),
        (["--step", "6", "--trainer.max_steps", "5"], "was not taken again, for the replay ended behind step 5; leave"),
    ],
)
def test_what_cannot_be_is_refused(run: Path, words: list[str], sentence: str) -> None:
    done = command("replay", run, *words)
    assert (done.code, sentence in done.err) == (2, True)


def test_a_run_with_the_recovery_ladder_is_replayed_and_left_alone(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path, stability__recovery={}, checkpoints={"every_steps": 2, "first_step": 2, "keep_last": 9}
    )
    done = command("fit", "--config", recipe)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "tiny" / "0001"
    before = {path: path.read_bytes() for path in listing(run)}
    done = command("replay", run, "--step", "5", "--worst", "0")
    assert (done.code, "same: steps 5 to 5" in done.out) == (0, True), done.out + done.err
    assert {path: path.read_bytes() for path in listing(run)} == before
