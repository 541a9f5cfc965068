"""The subcommands as a user types them, in this process, except where a signal is sent."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tiny_recipe import STEPS, Done, command, losses, signal_at_line, start, write_recipe, write_store

from lit_stable.callbacks.checkpoint_files import shard_files
from lit_stable.cli.command import Command


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One finished fit; tests may add runs beside it under other names, but leave it as it is."""
    folder = tmp_path_factory.mktemp("fitted")
    recipe = write_recipe(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # outside of any repository, as each test is
        done = command("fit", "--config", recipe)
    assert done.code == 0, done.err
    run = folder / "runs" / "tiny" / "0001"
    return SimpleNamespace(
        folder=folder,
        recipe=recipe,
        done=done,
        run=run,
        last=run / "checkpoints" / f"step-{STEPS:08d}.ckpt",
    )


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def fit(*words: Any) -> Done:
    done = command("fit", *words)
    assert done.code == 0, done.err
    return done


def steps_of(done: Done) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/", done.out, re.MULTILINE)]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- fit -------------------------------------------------------------------------------------------------------------


def test_a_fit_writes_its_recipe_logs_and_a_checkpoint(fitted):
    names = {path.name for path in fitted.run.iterdir()}
    own = {"recipe-01.yaml", "environment-01.yaml", "sessions.jsonl", "start-01.txt", "under_way.json"}
    assert names == {*own, "csv-01", "tensorboard", "checkpoints"}
    assert [path.name for path in (fitted.run / "checkpoints").glob("*.ckpt")] == [fitted.last.name]
    assert list(losses(fitted.run)) == list(range(1, STEPS + 1))
    with (fitted.run / "csv-01" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["val/text/loss"]] == ["3", "6"]
    assert [float(row["progress/tokens"]) for row in rows if row["train/loss"]] == [128 * k for k in range(1, 7)]


def test_a_fit_says_what_it_does_and_ends_with_a_table(fitted):
    assert steps_of(fitted.done) == list(range(1, STEPS + 1))
    table = fitted.done.out.split("\n\n")[-1]
    first, last = losses(fitted.run)[1], losses(fitted.run)[STEPS]
    assert re.search(rf"^steps +{STEPS} \(0 skipped\)$", table, re.MULTILINE)
    assert re.search(r"^tokens +768$", table, re.MULTILINE)
    assert f"{float(first):.4f} at step 1 -> {float(last):.4f} at step {STEPS}" in table
    assert re.search(r"^validation text +\S+ at step \d+, NOT BELOW the unigram entropy 2\.", table, re.MULTILINE)
    assert f"checkpoint, last      {fitted.last}" in table
    assert table.rstrip().endswith(f"lit-stable fit --config {fitted.recipe} --resume auto")


def test_the_same_command_again_is_a_new_run_and_overwrites_nothing(recipe, tmp_path):
    fit("--config", recipe, "--trainer.max_steps", "2")
    before = snapshot(tmp_path / "runs" / "tiny" / "0001")
    done = fit("--config", recipe, "--trainer.max_steps", "2")
    assert f"run folder: {tmp_path / 'runs' / 'tiny' / '0002'}" in done.out
    assert snapshot(tmp_path / "runs" / "tiny" / "0001") == before
    assert losses(tmp_path / "runs" / "tiny" / "0002") == losses(tmp_path / "runs" / "tiny" / "0001")


def test_a_refused_recipe_uses_up_no_run_number(recipe, tmp_path):
    done = command("fit", "--config", recipe, "--trainer.check_val_every_n_epoch", "1")
    assert done.code == 2
    assert "counts optimizer steps" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("typed", [["--resume", "auto"], ["--resume=auto"]])
def test_resume_auto_starts_a_run_then_goes_on_in_it(recipe, tmp_path, fitted, typed):
    begun = fit("--config", recipe, "--trainer.max_steps", "4", *typed)
    assert begun.out.startswith("resume=auto: no run of 'tiny' yet, starting one\n")
    done = fit("--config", recipe, *typed)
    run = tmp_path / "runs" / "tiny" / "0001"
    assert done.out.startswith(f"resume=auto: going on with {run / 'checkpoints' / 'step-00000004.ckpt'}\n")
    assert "changed since the checkpoint: trainer.max_steps: 4 -> 6\n" in done.out
    assert steps_of(done) == [5, 6]
    assert [path.name for path in run.parent.iterdir()] == ["0001"]
    assert {path.name for path in run.iterdir()} >= {"recipe-01.yaml", "recipe-02.yaml", "csv-01", "csv-02"}
    assert losses(run) == losses(fitted.run)


def test_a_finished_run_resumed_has_nothing_to_do_and_says_so(fitted):
    before = snapshot(fitted.run / "checkpoints")
    done = fit("--config", fitted.recipe, "--resume", "auto")
    assert done.out.endswith(f"nothing to do: {fitted.last} is at step 6; set --trainer.max_steps above it to go on.\n")
    assert snapshot(fitted.run / "checkpoints") == before


def test_a_branch_in_which_nothing_is_to_be_trained_uses_up_no_number(fitted):
    before = snapshot(fitted.run.parent)
    done = fit("--config", fitted.recipe, "--resume", "auto", "--model.z_loss", "0.1")
    assert "nothing to do:" in done.out
    after = snapshot(fitted.run.parent)
    assert sorted({Path(name).parts[0] for name in after}) == sorted({Path(name).parts[0] for name in before})


def test_what_the_table_says_to_type_goes_on_with_the_run(fitted, tmp_path):
    name = ["--run.name", "continued", "--trainer.accelerator", "auto", "--trainer.accelerator", "cpu"]
    done = fit("--config", fitted.recipe, *name, "--ckpt_path", fitted.last, "--trainer.max_steps", "7")
    assert steps_of(done) == [7]
    typed = shlex.split(done.out.rstrip().splitlines()[-1].removeprefix("to go on"))
    assert typed[:2] == ["lit-stable", "fit"]
    again = command(*typed[1:])
    assert again.code == 0, again.err
    assert "resume=auto: going on with" in again.out
    assert "nothing to do:" in again.out


def test_what_was_started_by_torchrun_goes_on_by_torchrun(monkeypatch):
    typed = Command("fit", ["--config", "my.yaml", "--ckpt_path", "last"], [], [], [])
    for world, launcher in [
        (8, "torchrun --standalone --nproc-per-node 8"),
        (16, "on each of 2 hosts, with their rendezvous: torchrun --nnodes 2 --nproc-per-node 8"),
    ]:
        for name, value in {"LOCAL_WORLD_SIZE": 8, "WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "none"}.items():
            monkeypatch.setenv(name, str(value))
        assert typed.to_go_on == f"{launcher} -m lit_stable fit --config my.yaml --resume auto"


def test_ckpt_path_takes_a_file_and_a_run_folder(fitted):
    for path in (fitted.last, fitted.run):
        done = fit("--config", fitted.recipe, "--run.name", "from", "--ckpt_path", path, "--trainer.max_steps", "7")
        assert steps_of(done) == [7]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ckpt_path", "last"], r"ckpt_path=last: no run of 'tiny' under \S+ has a checkpoint; .*`--resume auto`"),
        (["--ckpt_path", "gone.ckpt"], r"ckpt_path=gone.ckpt: does not exist; . has no checkpoint\."),
        (["--ckpt_path", "x", "--resume", "auto"], r"ckpt_path=x and resume=auto: .* give one of them\."),
        (["--resume", "always"], r"--resume: must be one of auto"),
        (["--trainer.strategy", "fsdpp"], r"trainer.strategy=fsdpp: is no strategy; nearest is fsdp\."),
        (["--trainer.strategy", "xyz"], r"trainer.strategy=xyz: is no strategy; take auto, ddp, fsdp2, fsdp2_full or"),
        (["--trainer.strategy", "fsdp"], r"The strategy `fsdp` requires a GPU accelerator"),
        (["--validate_every", "0"], r"validate_every=0: must be at least 1\."),
        (["--trainer.callbacks+", "GradClip", "--trainer.callbacks.max_norm", "2"], r"GradClip: stands in trainer"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_sentence(recipe, words, sentence):
    done = command("fit", "--config", recipe, *words)
    assert done.code == 2
    assert re.match(f"lit-stable fit: (?:{sentence})", done.err), done.err
    assert "Traceback" not in done.err


def test_an_error_that_is_not_the_users_keeps_its_traceback(recipe, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.Trainer.fit", lambda *_, **__: int("no number"))
    with pytest.raises(ValueError, match="invalid literal"):
        command("fit", "--config", recipe)


# -- recipes ---------------------------------------------------------------------------------------------------------


def test_the_stored_recipe_resolves_to_itself(fitted):
    stored = fitted.run / "recipe-01.yaml"
    done = fit("--config", stored, "--run.name", "again", "--trainer.max_steps", str(STEPS))
    again = yaml.safe_load((fitted.folder / "runs" / "again" / "0001" / "recipe-01.yaml").read_text())
    first = yaml.safe_load(stored.read_text())
    assert {**again, "run": {**again["run"], "name": first["run"]["name"]}} == first
    assert losses(fitted.folder / "runs" / "again" / "0001") == losses(fitted.run), done.out


def test_two_recipes_merge_by_key_and_null_removes_a_feature(fitted, tmp_path):
    over = tmp_path / "over.yaml"
    over.write_text("model: {schedule: {peak: 0.02}}\nstability: {grad_clip: null}\n")
    done = command("check", "--config", fitted.recipe, "--config", over)
    assert "                 2          0.02  warm-up ends" in done.out
    assert "                 0             0  start" in done.out
    assert done.out.rstrip().endswith("features: none")


def test_a_recipe_inherits_from_its_base_and_names_the_run(fitted, tmp_path):
    child = tmp_path / "child.yaml"
    child.write_text(f"base: {fitted.recipe}\ntrainer: {{max_steps: 1}}\n")
    done = fit("--config", child)
    assert f"run folder: {fitted.folder / 'runs' / 'child' / '0001'}" in done.out


def test_one_argument_of_a_feature_on_the_command_line(fitted):
    done = command("check", "--config", fitted.recipe, "--stability.grad_clip.max_norm", "0.25")
    assert "features: GradClip(max_norm=0.25" in done.out


def test_all_problems_that_the_parser_sees_come_together(tmp_path):
    path = write_recipe(tmp_path, model__schedule__peek=0.1, data__micro_batch="many", stability__grad_clap={})
    done = command("fit", "--config", path)
    assert done.code == 2
    lines = done.err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"lit-stable fit: {path}:")
    for text in (
        "model.schedule.peek: is no option; nearest is model.schedule.peak.",
        "data.micro_batch: must be an int, not 'many'.",
        "stability.grad_clap: is no option; nearest is stability.grad_clip.",
    ):
        assert text in done.err


def test_lightnings_timer_has_an_enumeration_for_a_default_and_goes_into_the_stored_recipe(fitted):
    timer = "{timer: {class_path: lightning.pytorch.callbacks.Timer, init_args: {duration: '00:01:00:00'}}}"
    words = ["--run.name", "timed", "--stability.extra", timer]
    fit("--config", fitted.recipe, *words, "--trainer.max_steps", "1")
    stored = fitted.folder / "runs" / "timed" / "0001" / "recipe-01.yaml"
    extra = yaml.safe_load(stored.read_text())["stability"]["extra"]
    assert extra["timer"]["init_args"] == {"duration": "00:01:00:00", "interval": "step", "verbose": True}
    assert steps_of(fit("--config", stored, "--resume", "auto", "--trainer.max_steps", "2")) == [2]


# -- the recipe wins over the checkpoint (D1, D2) --------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(fitted: SimpleNamespace) -> Path:
    """A sharded checkpoint of the same recipe."""
    fit("--config", fitted.recipe, "--run.name", "sharded", "--trainer.strategy", "fsdp2", "--trainer.max_steps", "2")
    return fitted.folder / "runs" / "sharded" / "0001" / "checkpoints" / "step-00000002.ckpt"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_explicit_values_win_over_the_checkpoint_and_are_printed(fitted, sharded, kind):
    path, strategy = (fitted.last, "auto") if kind == "file" else (sharded, "fsdp2")
    assert path.is_dir() == (kind == "directory")
    words = ["--model.schedule.peak", "0.5", "--model.schedule.on_conflict", "override"]
    words += ["--model.optimizer.weight_decay", "0.25", "--model.optimizer.betas", "[0.8, 0.9]"]
    words += ["--trainer.strategy", strategy, "--run.name", f"changed-{kind}", "--trainer.max_steps", "7"]
    done = fit("--config", fitted.recipe, "--ckpt_path", path, *words)
    for line in (
        "model.schedule.peak: 0.01 -> 0.5 (on_conflict: override)",
        "optimizer group weights: weight_decay 0.1 -> 0.25 (recipe)",
        "optimizer group norms: betas (0.9, 0.95) -> (0.8, 0.9) (recipe)",
        "changed since the checkpoint: model.optimizer.weight_decay: 0.1 -> 0.25",
    ):
        assert f"{line}\n" in done.out, line
    first = int(re.search(r"step-0*(\d+)", path.name)[1]) + 1
    assert steps_of(done) == list(range(first, 8))
    assert re.search(r"^step 7/7 .*\| lr 0\.49", done.out, re.MULTILINE)


def test_hyper_parameters_inside_a_checkpoint_do_not_reach_the_recipe(fitted, tmp_path):
    checkpoint = torch.load(fitted.last, weights_only=True)
    path = tmp_path / "step-00000006.ckpt"
    torch.save({**checkpoint, "hyper_parameters": {"seed_init": 77, "recompute": True}}, path)
    name = ["--run.name", "foreign", "--trainer.max_steps", "7"]
    done = fit("--config", fitted.recipe, *name, "--ckpt_path", path, "--model.seed_init", "5")
    used = yaml.safe_load((fitted.folder / "runs" / "foreign" / "0001" / "recipe-01.yaml").read_text())
    assert (used["model"]["seed_init"], used["model"]["recompute"]) == (5, False)
    assert "changed since the checkpoint: model.seed_init: 0 -> 5\n" in done.out


def test_a_schedule_in_conflict_is_refused_by_default(fitted):
    words = ["--ckpt_path", fitted.last, "--model.schedule.peak", "0.5", "--trainer.max_steps", "7"]
    done = command("fit", "--config", fitted.recipe, "--run.name", "conflict", *words)
    assert done.code == 2
    assert "schedule.peak 0.01 in the checkpoint but 0.5 in the recipe" in done.err
    assert not (fitted.folder / "runs" / "conflict").exists()


# -- damaged input ---------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change one bit of what the file says, not of the padding between the records of a checkpoint."""
    content = bytearray(path.read_bytes())
    place = len(content) // 2
    if zipfile.is_zipfile(path):
        largest = max(zipfile.ZipFile(path).infolist(), key=lambda record: record.file_size)
        names = int.from_bytes(content[largest.header_offset + 26 : largest.header_offset + 28], "little")
        extra = int.from_bytes(content[largest.header_offset + 28 : largest.header_offset + 30], "little")
        place = largest.header_offset + 30 + names + extra + largest.file_size // 2
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_corrupt_token_shard_is_one_sentence_with_the_file(recipe, tmp_path, workers):
    shard = write_store(tmp_path) / "train" / "shard-00000.bin"
    flip(shard)
    done = command("fit", "--config", recipe, "--data.num_workers", workers)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert str(shard) in done.err


def test_a_missing_token_shard_is_one_sentence_with_the_file(recipe, tmp_path):
    shard = write_store(tmp_path) / "train" / "shard-00000.bin"
    shard.unlink()
    done = command("fit", "--config", recipe)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert str(shard) in done.err


def test_a_damaged_sharded_checkpoint_is_refused(fitted, sharded, tmp_path):
    victim = shard_files(sharded)[0]
    content = victim.read_bytes()
    flip(victim)
    words = ["--ckpt_path", sharded, "--trainer.strategy", "fsdp2", "--run.name", "damaged"]
    done = command("fit", "--config", fitted.recipe, *words)
    victim.write_bytes(content)
    assert (done.code, str(victim) in done.err) == (1, True)


# -- validate and test -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["validate", "test"])
def test_validate_and_test_need_a_checkpoint(fitted, name):
    done = command(name, "--config", fitted.recipe)
    assert done.code == 2
    assert done.err == (
        f"lit-stable {name}: ckpt_path=null: `{name}` needs a checkpoint; give --ckpt_path PATH or last.\n"
    )


def test_validate_prints_the_loss_that_the_fit_ended_with(fitted):
    line = [line for line in fitted.done.out.splitlines() if line.startswith("  validation text: ")][-1]
    before = snapshot(fitted.run)
    done = command("validate", "--config", fitted.recipe, "--ckpt_path", fitted.last)
    assert (done.code, done.out) == (0, f"{line}\n")
    assert snapshot(fitted.run) == before


def test_test_reads_every_window(fitted):
    done = command("test", "--config", fitted.recipe, "--ckpt_path", fitted.last)
    every = command("validate", "--config", fitted.recipe, "--ckpt_path", fitted.last, "--data.validation_windows=null")
    assert done.code == 0
    assert done.out == every.out


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_ends_a_fit_with_one_checkpoint_and_a_code_and_resuming_goes_on(tmp_path, fitted, number, code):
    recipe = write_recipe(tmp_path, checkpoints__every_steps=10_000, checkpoints__first_step=None, validate_every=10**6)
    also = ["--graceful_stop.also", "[SIGUSR1]"]
    process = start("fit", "--config", recipe, "--trainer.max_steps", "100000", *also)
    done = signal_at_line(process, number, "step 3/")
    assert done.code == code, done.out
    checkpoints = list((tmp_path / "runs" / "tiny" / "0001" / "checkpoints").iterdir())
    assert len(checkpoints) == 1
    stopped = steps_of(done)[-1]
    assert checkpoints[0].name == f"step-{stopped:08d}.ckpt"
    assert f"{number.name} received: writing a checkpoint after step {stopped}, then stopping." in done.out
    again = fit("--config", recipe, "--resume", "auto", "--trainer.max_steps", str(stopped + 2))
    assert steps_of(again) == [stopped + 1, stopped + 2]
    found = losses(tmp_path / "runs" / "tiny" / "0001")
    assert list(found) == list(range(1, stopped + 3))
    unstopped = losses(fitted.run)
    assert all(loss == unstopped[step] for step, loss in found.items() if step in unstopped)


def test_under_slurm_notice_is_for_the_recipe_where_its_plugin_leaves_it(tmp_path, monkeypatch):
    for name, value in {"NTASKS": "1", "NTASKS_PER_NODE": "1", "JOB_ID": "1", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    path = "lightning.pytorch.plugins.environments.SLURMEnvironment"
    plugins = [{"class_path": path, "init_args": {"auto_requeue": False}}]
    recipe = write_recipe(tmp_path, graceful_stop={"also": ["SIGUSR1"]}, trainer__max_steps=1)
    done = command("fit", "--config", recipe)
    assert done.code == 2
    assert "`GracefulStop(also=['SIGUSR1'])`: under Slurm Lightning requeues the job on SIGUSR1; give" in done.err
    changes = {"graceful_stop": {"also": ["SIGUSR1"]}, "trainer__max_steps": 1, "trainer__plugins": plugins}
    done = command("fit", "--config", write_recipe(tmp_path, **changes))
    assert done.code == 0, done.err


def test_a_checkpoint_carries_its_format_and_recipe(fitted):
    checkpoint = torch.load(fitted.last, weights_only=True)
    assert checkpoint["lit_stable"]["format"] == 1
    assert checkpoint["lit_stable"]["recipe"] == yaml.safe_load((fitted.run / "recipe-01.yaml").read_text())
    assert json.dumps(checkpoint["lit_stable"])  # plain data


def test_a_sharded_checkpoint_without_its_strategy_is_one_sentence(fitted, sharded):
    for name in ("validate", "fit"):
        done = command(name, "--config", fitted.recipe, "--ckpt_path", sharded, "--run.name", "unsharded")
        assert done.code == 2
        assert "is a sharded checkpoint" in done.err
        assert "--trainer.strategy fsdp2" in done.err


def test_a_file_of_one_device_goes_on_under_fsdp2(fitted):
    words = ["--ckpt_path", fitted.run, "--trainer.max_steps", "8"]
    alone = command("fit", "--config", fitted.recipe, *words, "--run.name", "alone")
    shards = command("fit", "--config", fitted.recipe, *words, "--run.name", "shards", "--trainer.strategy", "fsdp2")
    assert (alone.code, shards.code) == (0, 0), shards.err
    found = [losses(fitted.folder / "runs" / name / "0001") for name in ("alone", "shards")]
    assert list(found[0]) == [STEPS + 1, STEPS + 2]
    assert found[0].keys() == found[1].keys()
    assert [float(loss) for loss in found[1].values()] == pytest.approx([float(loss) for loss in found[0].values()])


def test_steps_to_skip_are_counted_from_where_the_run_stands(fitted):
    # Six steps of 4 samples lie behind; steps 7 and 8 of 8 samples are samples 24 to 39.
    words = ["--data.global_batch", "8", "--data.skip_steps", "[7-8]", "--trainer.max_steps", "7"]
    done = command("fit", "--config", fitted.recipe, "--ckpt_path", fitted.run, "--run.name", "skips", *words)
    assert done.code == 0, done.err
    assert "dropped sample ranges [(24, 40)]" in done.out


def test_a_loss_that_is_not_finite_is_said_and_keeps_the_checkpoints_before_it(recipe, tmp_path):
    words = ["--model.schedule.peak", "1e30", "--stability.grad_clip", "null", "--checkpoints.every_steps", "2"]
    done = fit("--config", recipe, *words, "--model.schedule.warmup", "0")
    assert "the loss is nan; checkpoints saved before it are kept from here on." in done.out
    kept = sorted(path.name for path in (tmp_path / "runs" / "tiny" / "0001" / "checkpoints").glob("*.ckpt"))
    assert kept == [f"step-{step:08d}.ckpt" for step in (2, 4, 6)]


def test_an_error_in_validation_ends_the_process_though_data_workers_live(tmp_path):
    """Data workers leave SIGTERM to the trainer; at its exit they must not be waited for."""
    (tmp_path / "breaks.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Breaks(Callback):\n"
        "    def on_validation_batch_end(self, trainer, *rest, **more):\n"
        "        if not trainer.sanity_checking: raise KeyError('broken')\n"
    )
    recipe = write_recipe(tmp_path, data__num_workers=1, trainer__callbacks=[{"class_path": "breaks.Breaks"}])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    argv = [sys.executable, "-m", "lit_stable", "fit", "--config", str(recipe)]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "KeyError: 'broken'" in done.stderr
