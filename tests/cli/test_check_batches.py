"""Steps and tokens under warm-ups, by hand; and what the command makes of the same recipe."""

from __future__ import annotations

import re

import pytest
from tiny_recipe import command, write_recipe

from lit_stable.callbacks import BatchSizeWarmup, SequenceLengthWarmup
from lit_stable.cli.check_batches import tokens_by_length

RAMP = "2 for 2 steps then 4 for 1 steps"
LENGTHS = "{min_length: 8, total_steps: 4}"  # 8, 16, 24, then 32


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path, data__global_batch=8, trainer__max_steps=5, checkpoints__every_steps=2)


def fit(*words) -> str:
    done = command("fit", *words)
    assert done.code == 0, done.err
    return done.out


def test_tokens_are_counted_by_the_length_they_stand_in():
    ramp = BatchSizeWarmup(RAMP, global_batch=8, micro_batch=2)
    lengths = SequenceLengthWarmup(min_length=8, total_steps=4, max_length=32)
    assert tokens_by_length(ramp.samples_before, None, 32, 5) == {32: (2 + 2 + 4 + 8 + 8) * 32}
    assert tokens_by_length(ramp.samples_before, lengths, 32, 5) == {8: 2 * 8, 16: 2 * 16, 24: 4 * 24, 32: 16 * 32}
    assert tokens_by_length(lambda step: 8 * (step - 1), lengths, 32, 2) == {8: 64, 16: 128, 32: 0}
    melted = SequenceLengthWarmup(min_length=8, total_steps=4, max_length=32, mode="melt")
    assert tokens_by_length(lambda step: 8 * (step - 1), melted, 32, 4) == {8: 256, 16: 256, 24: 192, 32: 256}


def test_the_ramp_is_shown_and_its_tokens_are_those_that_are_trained_on(recipe):
    words = ["--config", recipe, "--stability.batch_size_warmup.ramp", RAMP]
    page = command("check", *words).out
    assert "batch size: 2 (2 at once) from step 1, 4 (2 at once) from step 3, 8 (2 at once) from step 4" in page
    assert "8 samples before the full batch" in page
    assert "run: 5 steps, 768 tokens, " in page
    out = fit(*words)
    assert re.search(r"^tokens +768$", out, re.MULTILINE)
    assert "AccumulationWindows" not in out


def test_a_run_with_a_ramp_goes_on_in_its_stage(recipe):
    words = ["--config", recipe, "--stability.batch_size_warmup.ramp", RAMP]
    fit(*words, "--trainer.max_steps", "2")
    out = fit(*words, "--resume", "auto")
    assert "position: step 2, 4 samples, 128 tokens" in out
    assert re.search(r"^tokens +768$", out, re.MULTILINE)


def test_a_ramp_of_many_stages_is_shown_by_its_ends(recipe):
    page = command(
        "check",
        "--config",
        recipe,
        "--stability.batch_size_warmup.ramp",
        "1 1 70",
        "--stability.batch_size_warmup.fit_micro_batch",
        "true",
    ).out
    assert (
        "batch size: 1 (1 at once) from step 1, 2 (2 at once) from step 11, 3 (1 at once) from step 16, ..., 8" in page
    )


def test_lengths_are_shown_and_their_tokens_are_those_that_are_trained_on(recipe):
    words = ["--config", recipe, "--stability.sequence_length_warmup", LENGTHS]
    page = command("check", *words).out
    tokens = 8 * (8 + 16 + 24 + 32 + 32)
    assert "sequence length: truncate to 8 at step 1, 32 in the end; 4 distinct lengths" in page
    assert f"run: 5 steps, {tokens} tokens, " in page
    assert re.search(rf"^tokens +{tokens}$", fit(*words), re.MULTILINE)


@pytest.mark.parametrize("subcommand", ["check", "fit"])
def test_problems_between_ramp_and_data_are_told_before_training(recipe, subcommand):
    ramp = "--stability.batch_size_warmup.ramp"
    assert "ends at 4: must end at the full global batch 8" in command(subcommand, "--config", recipe, ramp, "4").err
    done = command(subcommand, "--config", recipe, ramp, "3 for 2 steps")
    assert (done.code, "its batch 3 must be a multiple of micro_batch x data-parallel" in done.err) == (2, True)
    done = command(subcommand, "--config", recipe, ramp, RAMP, "--stability.batch_size_warmup.global_batch", "16")
    assert "the data module has global_batch=8; leave global_batch out" in done.err
    both = [ramp, RAMP, "--stability.sequence_length_warmup", LENGTHS]
    done = command("fit", "--config", recipe, *both)
    assert (done.code, "set allow_both if you mean it" in done.err) == (2, True)
