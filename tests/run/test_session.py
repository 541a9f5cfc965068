"""A run on disk: its folder, its log files and what its checkpoints remember."""

from __future__ import annotations

import csv
import errno
import os
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from full_disk import files_of_at_most
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_recipe import command, write_recipe

from lit_stable.run import fingerprint
from lit_stable.run.branch import Parent, read_parent
from lit_stable.run.under_way import UnderWay


@pytest.fixture(scope="module")
def twice(tmp_path_factory) -> Path:
    """A run of 3 steps that went on to 5, as if the first had been killed at step 4."""
    folder = tmp_path_factory.mktemp("session")
    recipe = write_recipe(folder, checkpoints__every_steps=3, checkpoints__first_step=None, validate_every=100)
    assert command("fit", "--config", recipe, "--trainer.max_steps", "4", "--checkpoints.keep_last", "5").code == 0
    run = folder / "runs" / "tiny" / "0001"
    (run / "checkpoints" / "step-00000004.ckpt").unlink()
    done = command("fit", "--config", recipe, "--resume", "auto", "--trainer.max_steps", "5", "--validate_every", "99")
    assert done.code == 0, done.err
    (folder / "said.txt").write_text(done.out)
    return run


def test_every_session_has_a_recipe_and_a_csv_file_of_its_own(twice):
    assert sorted(path.name for path in twice.glob("recipe-*")) == ["recipe-01.yaml", "recipe-02.yaml"]
    rows = {}
    for name in ("csv-01", "csv-02"):
        with (twice / name / "metrics.csv").open() as file:
            rows[name] = [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert rows == {"csv-01": [1, 2, 3, 4], "csv-02": [4, 5]}


def test_tensorboard_shows_each_step_once(twice):
    events = EventAccumulator(str(twice / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_what_changed_since_the_checkpoint_is_printed(twice):
    said = (twice.parents[2] / "said.txt").read_text()
    lines = re.findall("^changed since the checkpoint: (.*)$", said, re.MULTILINE)
    assert lines == ["trainer.max_steps: 4 -> 5", "validate_every: 100 -> 99"]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_run_has_dropped_does_not_come_back_in_another_order(tmp_path):
    recipe = write_recipe(tmp_path, checkpoints__keep_last=9)
    words = ["--config", recipe, "--trainer.max_steps", "4", "--data.skip_steps", "[4]"]
    assert command("fit", *words).code == 0
    words += ["--ckpt_path", f"{tmp_path / 'runs' / 'tiny' / '0001'}@2"]
    for change, sentence in [
        (["--data.seed_data", "2"], "data.seed_data: 1 -> 2: puts other samples at stream positions"),
        (["--data.order.reshuffle", "{2 steps: 5}"], "data.order.reshuffle={2 steps: 5}: lies before stream positions"),
    ]:
        done = command("fit", *words, *change)
        assert (done.code, sentence in done.err) == (2, True), done.err
        assert "Traceback" not in done.err


def test_a_resume_that_changes_the_run_is_a_branch_and_leaves_its_parent_as_it_was(tmp_path):
    recipe = write_recipe(tmp_path, checkpoints__keep_last=9)
    assert command("fit", "--config", recipe, "--trainer.max_steps", "4").code == 0
    parent, branch, second = (tmp_path / "runs" / "tiny" / f"000{n}" for n in (1, 2, 3))
    before = snapshot(parent)
    words = ["--config", recipe, "--resume", "auto", "--trainer.max_steps", "5", "--data.seed_data", "2"]
    done = command("fit", *words)
    assert done.code == 0, done.err
    assert f"run folder: {branch}" in done.out
    assert f"a branch of {parent} at step 4\n" in done.out
    assert "another order of samples from here on (data.seed_data): of an epoch" in done.out
    assert read_parent(branch) == Parent("../0001", 4, ["trainer.max_steps: 4 -> 5", "data.seed_data: 1 -> 2"])
    # The branch goes on as one run, and a checkpoint in the middle of the parent begins another.
    assert "nothing to do" in command("fit", *words).out
    words = ["--ckpt_path", f"{parent}@2", "--model.schedule.peak", "0.02", "--model.schedule.on_conflict", "override"]
    done = command("fit", "--config", recipe, *words, "--trainer.max_steps", "4")
    assert done.code == 0, done.err
    assert read_parent(second) == Parent(
        "../0001", 2, ["model.schedule.peak: 0.01 -> 0.02", "model.schedule.on_conflict: error -> override"]
    )
    assert snapshot(parent) == before
    page = command("runs", tmp_path / "runs").out
    loss = r"loss \d\.\d{4}"
    pattern = (
        rf"tiny/0001  step 4, {loss}, checkpoints 2, 3, 4\n"
        rf"├── tiny/0003  from step 2, step 4, {loss}, checkpoints 3, 4\n"
        r"│       model.schedule.peak: 0.01 -> 0.02\n"
        r"│       model.schedule.on_conflict: error -> override\n"
        rf"└── tiny/0002  from step 4, step 5, {loss}, checkpoints 5\n"
        r"        trainer.max_steps: 4 -> 5\n"
        r"        data.seed_data: 1 -> 2\n"
    )
    assert re.fullmatch(pattern, page), page


def test_who_goes_on_is_told_of_a_run_under_way_before_the_checkpoint_is_read(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path)
    assert command("fit", "--config", recipe, "--trainer.max_steps", "2").code == 0
    run = tmp_path / "runs" / "tiny" / "0001"
    (run / "checkpoints" / "step-00000002.ckpt").write_text("the run that goes on has deleted it")
    monkeypatch.setattr(UnderWay, "take", lambda self, folder: "process 71 on node3 since noon")
    done = command("fit", "--config", recipe, "--resume", "auto")
    assert (done.code, f"{run}: a run is under way there (process 71 " in done.err) == (2, True), done.err


def test_who_goes_on_is_refused_where_the_run_went_on_since_its_checkpoint_was_looked_for(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path)
    assert command("fit", "--config", recipe, "--trainer.max_steps", "2").code == 0
    run = tmp_path / "runs" / "tiny" / "0001"
    two, four = (run / "checkpoints" / f"step-0000000{step}.ckpt" for step in (2, 4))
    take = UnderWay.take

    def when_the_other_has_ended(lock: UnderWay, folder: Path) -> str | None:
        shutil.copy(two, four)
        return take(lock, folder)

    monkeypatch.setattr(UnderWay, "take", when_the_other_has_ended)
    before = {path.name for path in run.iterdir()}
    done = command("fit", "--config", recipe, "--resume", "auto")
    assert done.code == 2
    assert done.err == (
        f"lit-stable fit: {two}: is not where the run stands any more, which has gone on to {four} in the meantime;"
        " give the command again.\n"
    )
    assert {path.name for path in run.iterdir()} == before


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path, monkeypatch):
    def cannot(lock: UnderWay, folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr(UnderWay, "take", cannot)
    done = command("fit", "--config", write_recipe(tmp_path))
    assert done.code == 2
    assert done.err == (
        f"lit-stable fit: {tmp_path}/runs/tiny/0001: cannot be written to (Read-only file system), and a run keeps its"
        " checkpoints and logs there; mend that, or begin under another run.root, at a checkpoint by --ckpt_path.\n"
    )


@pytest.mark.parametrize("room", [500, 2000])  # for neither file of a session, and for what is read back of no recipe
def test_a_disk_that_fills_as_a_session_begins_is_a_sentence_and_the_run_goes_on_when_there_is_room(tmp_path, room):
    recipe = write_recipe(tmp_path)
    assert command("fit", "--config", recipe, "--trainer.max_steps", "2").code == 0
    run = tmp_path / "runs" / "tiny" / "0001"
    words = ["--config", recipe, "--resume", "auto", "--trainer.max_steps", "3"]
    with files_of_at_most(room):
        done = command("fit", *words)
    assert done.code == 1
    assert re.fullmatch(
        rf"lit-stable fit: {run}/\w+-02\.yaml: could not be written \(File too large; [\d.e+]+ GiB are free there\);"
        " what was saved before it is whole: make room and go on from that.\n",
        done.err,
    ), done.err
    assert not [path for path in run.iterdir() if path.name.startswith("recipe-02") or path.suffix == ".partial"]
    done = command("fit", *words)
    assert (done.code, "a branch" in done.out) == (0, False), done.err
    assert [path.name for path in sorted((tmp_path / "runs" / "tiny").iterdir())] == ["0001"]
    assert yaml.safe_load((run / "recipe-02.yaml").read_text())["trainer"]["max_steps"] == 3


@pytest.mark.parametrize("text", ["", "model:\n  gpt: {n_la"])
def test_a_recipe_that_was_cut_short_is_named_and_the_run_goes_on_by_the_one_before(tmp_path, text):
    recipe = write_recipe(tmp_path)
    assert command("fit", "--config", recipe, "--trainer.max_steps", "2").code == 0
    run = tmp_path / "runs" / "tiny" / "0001"
    for kind in ("recipe", "environment"):
        (run / f"{kind}-02.yaml").write_text(text)
    done = command("fit", "--config", recipe, "--resume", "auto", "--trainer.max_steps", "3")
    assert (done.code, "a branch" in done.out) == (0, False), done.err
    for kind in ("recipe", "environment"):
        assert f"passed over: {run}/{kind}-02.yaml: cannot be read (" in done.out
        assert yaml.safe_load((run / f"{kind}-03.yaml").read_text())
        assert (run / f"{kind}-02.yaml").read_text() == text
    (run / "recipe-03.yaml").write_text(text)
    (run / "recipe-01.yaml").write_text(text)
    done = command("fit", "--config", recipe, "--resume", "auto", "--trainer.max_steps", "4")
    assert done.code == 2
    assert done.err == (
        f"lit-stable fit: {run}/recipe-03.yaml: cannot be read, nor any other recipe of the run, so nobody can tell"
        " whether this is it; put it back, or begin a branch with --ckpt_path.\n"
    )


def test_a_disk_that_fills_under_a_logger_is_a_sentence(tmp_path, monkeypatch):
    def full(self: CSVLogger) -> None:
        raise ValueError("you tried to log what is not supported") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CSVLogger, "save", full)
    done = command("fit", "--config", write_recipe(tmp_path))
    assert done.code == 1
    assert done.err.startswith(
        f"lit-stable fit: {tmp_path}/runs/tiny/0001: could not be written (No space left on device; "
    )


def test_other_data_do_not_pass_unseen(tmp_path):
    recipe = write_recipe(tmp_path)
    assert command("fit", "--config", recipe, "--trainer.max_steps", "2").code == 0
    (tmp_path / "text.txt").write_text("quite another text\n\n" * 50 + "with more\n\n" * 200)
    words = ["--tokenizer", "bytes", "--validation_fraction", "0", "--separator", "\n\n"]
    (tmp_path / "store").rename(tmp_path / "old")
    assert command("prepare", tmp_path / "text.txt", "--out", tmp_path / "store", *words).code == 0
    (tmp_path / "old" / "validation").rename(tmp_path / "store" / "validation")
    done = command("fit", "--config", recipe, "--resume", "auto", "--trainer.max_steps", "3")
    assert done.code == 0, done.err
    line = r"changed since the checkpoint: data.sources.text: \d+ tokens \(\w+\) -> \d+ tokens \(\w+\)$"
    assert len(re.findall(line, done.out, re.MULTILINE)) == 1
    assert "checkpoint: data.validation.text" not in done.out
    (difference,) = read_parent(tmp_path / "runs" / "tiny" / "0002").differences[1:]
    assert difference.startswith("data.sources.text: ")


def test_a_run_remembers_its_environment_and_says_what_has_changed_of_it(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path)
    words = ["--config", recipe, "--resume", "auto", "--trainer.max_steps"]
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert command("fit", *words, "2").code == 0
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    versions = fingerprint.versions()
    monkeypatch.setattr(fingerprint, "versions", lambda: {**versions, "torch": "9.9"})
    done = command("fit", *words, "3")
    assert done.code == 0, done.err
    lines = re.findall("^environment changed since the checkpoint: (.*)$", done.out, re.MULTILINE)
    assert lines == [f"torch: {versions['torch']} -> 9.9", "settings.NCCL_ALGO: Ring -> Tree"]
    run = tmp_path / "runs" / "tiny" / "0001"
    stored = [yaml.safe_load((run / f"environment-0{n}.yaml").read_text()) for n in (1, 2)]
    assert [one["torch"] for one in stored] == [versions["torch"], "9.9"]
    assert stored[0]["packages"]["numpy"] == version("numpy")
    assert stored[0]["data"].keys() == {"data.sources.text", "data.validation.text"}
    # Evaluated elsewhere, a checkpoint says the same.
    monkeypatch.undo()
    done = command("validate", "--config", recipe, "--ckpt_path", run)
    assert f"environment changed since the checkpoint: torch: 9.9 -> {versions['torch']}\n" in done.out


def test_data_that_the_model_cannot_take_are_refused_before_a_folder_exists(tmp_path):
    recipe = write_recipe(tmp_path, model__gpt__vocab_size=100, model__gpt__max_length=16)
    done = command("fit", "--config", recipe)
    assert done.code == 2
    assert done.err.splitlines() == [
        "lit-stable fit: model.gpt.vocab_size=100: must be at least 257, the vocabulary of the data.",
        "data.sequence_length=32: must be at most model.gpt.max_length=16.",
    ]
    assert not (tmp_path / "runs").exists()


def test_ones_own_logger_replaces_ours(tmp_path):
    logger = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: mine}}"
    done = command("fit", "--config", write_recipe(tmp_path), "--trainer.max_steps", "1", "--trainer.logger", logger)
    assert done.code == 0, done.err
    assert list((tmp_path / "mine").rglob("metrics.csv"))
    assert not list((tmp_path / "runs").rglob("metrics.csv"))


def test_without_a_logger_nothing_is_logged(tmp_path):
    done = command("fit", "--config", write_recipe(tmp_path), "--trainer.max_steps", "1", "--trainer.logger", "false")
    assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "runs" / "tiny" / "0001").iterdir()} == {
        "recipe-01.yaml",
        "sessions.jsonl",
        "environment-01.yaml",
        "start-01.txt",
        "checkpoints",
        "under_way.json",
    }


def test_a_recipe_names_places_in_the_home_folder_as_a_shell_does(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, checkpoints__mirror="~/copies", control__kill_file="~/STOP")
    (tmp_path / "store").rename(tmp_path / "moved")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = ["fit", "--config", recipe, "--run.root=~/here", "--data.sources.text.path=~/moved"]
    done = command(*words, "--trainer.max_steps", "2")
    assert done.code == 0, done.err
    run = tmp_path / "here" / "tiny" / "0001"
    assert [path.name for path in (run / "checkpoints").glob("*.ckpt")] == ["step-00000002.ckpt"]
    assert list((tmp_path / "copies").rglob("step-00000002.ckpt"))
    (tmp_path / "STOP").touch()
    assert command(*words, "--resume", "auto").code == 4
    assert not (tmp_path / "~").exists()
