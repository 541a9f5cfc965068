"""Every problem of every part, together, each with its key in the recipe."""

from __future__ import annotations

import re

import pytest
from tiny_recipe import command, write_recipe


def problems(recipe, *words: str) -> list[str]:
    """Each problem without the place that it comes from."""
    done = command("check", "--config", recipe, *words)
    assert done.code == 2
    lines = done.err.removeprefix("lit-stable check: ").splitlines()
    return [re.sub(rf"^{re.escape(str(recipe))}:\d+: ", "", line) for line in lines]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("construction"))


def test_the_problems_of_all_parts_come_in_one_message(tmp_path):
    recipe = write_recipe(
        tmp_path,
        trainer__strategy="fsdp3",
        model__gpt__n_head=3,
        model__gpt__dropout=1.0,
        model__schedule__peak=-1.0,
        model__optimizer={"weight_decay": -0.1, "eps": 0.0, "betas": [0.9, 1.0]},
        data__micro_batch=3,
        checkpoints__every_steps=0,
        validate_every="2M words",
        stability__grad_clip={"max_norm": 0.0},
        stability__detectors={"plateau": {"patience": 0}, "loss_scale": {"halvings": 1}},
        control__every_steps=0,
    )
    assert problems(recipe) == [
        "trainer.strategy=fsdp3: is no strategy; nearest is fsdp.",
        *(line for line in problems(recipe) if "d_model=16: must be a multiple of n_head=3" in line),
        *(line for line in problems(recipe) if "dropout=1.0: must be at least 0 and below 1" in line),
        "model.schedule.peak=-1.0: must be a finite number > 0.",
        "model.optimizer.betas=(0.9, 1.0): each must lie in [0, 1).",
        "model.optimizer.eps=0.0: must be > 0.",
        "model.optimizer.weight_decay=-0.1: must be a finite number >= 0.",
        "data.micro_batch=3: must divide data.global_batch=4; nearest legal values are 2 and 4.",
        "checkpoints.every_steps=0: must be at least 1.",
        "validate_every=2M words: must be a count of steps, samples or tokens, as 500 or 2M tokens.",
        "`RunControl(every_steps=0)`: must be at least 1.",
        "`Plateau(patience=0)`: must be at least 1.",
        "`LossScaleCollapse(halvings=1)`: must be at least 2.",
        "`GradClip(max_norm=0.0)`: must be a finite number > 0.",
    ]
    assert len(problems(recipe)) == 14


def test_what_only_the_command_line_makes_wrong_is_reported_too(recipe):
    words = ["--model.schedule.floor", "1.0", "--data.sequence_length", "0"]
    assert problems(recipe, *words) == [
        "model.schedule.floor=1.0: must lie between 0 and schedule.peak=0.01.",
        "data.sequence_length=0: must be at least 1.",
    ]


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["adaptive.decay", "2"], ["`ZClip(decay=2.0)`: must lie between 0 and 1."]),
        (["ada_gc", "{decay: 2, warmup_steps: 0}"], ["`AdaGC(decay=2.0)`", "`AdaGC(warmup_steps=0)`"]),
    ],
)
def test_the_options_of_an_option_are_refused_with_its_own_sentence(recipe, words, sentences):
    found = problems(recipe, f"--stability.grad_clip.{words[0]}", words[1])
    assert len(found) == len(sentences)
    assert all(line.startswith(sentence) for line, sentence in zip(found, sentences, strict=True))


def test_a_registered_strategy_and_one_given_as_a_class_pass(recipe):
    for strategy in ("auto", "ddp", "fsdp2", "fsdp2_full", "{class_path: lit_stable.strategies.fsdp2.FSDP2Strategy}"):
        done = command("check", "--config", recipe, "--trainer.strategy", strategy)
        assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--trainer.limit_train_batches", "5"), "the data are endless; set trainer.max_steps."),
        (("--trainer.val_check_interval", "4"), "validation follows what the run has consumed; set validate_every."),
        (("--trainer.accumulate_grad_batches", "2"), "follows from data.global_batch and data.micro_batch"),
        (("--trainer.gradient_clip_val", "1.0"), "gradients are clipped by stability.grad_clip; set its max_norm."),
        (("--trainer.fast_dev_run", "true"), "set --trainer.max_steps 2 instead."),
        (("--trainer.enable_checkpointing", "false"), "a run always writes checkpoints"),
        (("--trainer.precision", "64-true"), "must be one of 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true."),
        (("--trainer.precision", "16-true"), "strategy auto would store the weights themselves in fp16"),
    ],
)
def test_trainer_options_that_would_fight_with_ours_are_refused_with_what_to_write(recipe, words, sentence):
    (problem,) = problems(recipe, *words)
    assert problem.startswith(words[0].removeprefix("--") + "=")
    assert sentence in problem


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--run.name", "../x"], "run.name='../x': is the name of one folder below run.root"),
        (["--run.name", "a/b"], "run.name='a/b': is the name of one folder below run.root"),
        (["--run.name", "."], "run.name='.': is the name of one folder below run.root"),
        (["--run.name", ""], "run.name='': is the name of one folder below run.root"),
        (
            ["--run.name", "x" * 300],
            "run.name=xxxxxxxxxxxxxxxxxxxx...: has 300 bytes, and a folder's name at most",
        ),
        (["--control.kill_file", ""], "control.kill_file='': names no file; give its path, or null for none."),
        (
            ["--graceful_stop.also", "[KILL]"],
            "`GracefulStop(also=['KILL'])`: 'KILL' can be heeded by no process; name one of SIGUSR1, SIGUSR2, SIGHUP,"
            " SIGQUIT, SIGXCPU, SIGALRM, SIGURG.",
        ),
        (["--control.kill_file", "."], "control.kill_file='.': names no file; give its path, or null for none."),
        (["--ckpt_path", ""], "ckpt_path='': names no checkpoint; give a file, a run folder or RUN@STEP."),
    ],
)
def test_a_name_that_names_nothing_is_refused_and_nothing_is_written(recipe, words, sentence):
    runs = recipe.parent / "runs"
    before = sorted(runs.rglob("*")) if runs.exists() else []
    done = command("fit", "--config", recipe, *words)
    assert (done.code, sentence in done.err) == (2, True), done.err
    assert (sorted(runs.rglob("*")) if runs.exists() else []) == before
    assert not (recipe.parent / "x").exists()
