"""`lit-stable check`: numbers by hand for a tiny recipe."""

from __future__ import annotations

import pytest
from tiny_recipe import command, write_recipe, write_store

from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import flops_per_token


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("check"))


def check(recipe, *words) -> str:
    done = command("check", "--config", recipe, *words)
    assert done.code == 0, done.err
    return done.out


def place(recipe, key: str) -> str:
    """File and line that stand in front of a problem with a value of the recipe."""
    lines = recipe.read_text().splitlines()
    return f"{recipe}:{next(n for n, line in enumerate(lines, 1) if line.strip().startswith(f'{key}:'))}: "


@pytest.fixture(scope="module")
def page(recipe) -> str:
    return check(recipe)


def test_parameters_are_counted(page):
    # Embeddings (257 + 32) x 16, attention 4 x 16^2, MLP 8 x 16^2, three norms of 16; the head is tied.
    assert f"parameters: {289 * 16 + 12 * 256 + 3 * 16:,} (" in page


def test_decay_groups_are_listed(page):
    rows = {line.split()[0]: line.split()[1:4] for line in page.splitlines() if line[:4] in ("weig", "embe", "norm")}
    assert rows == {
        "weights": ["4", "3,072", "0.1"],
        "embeddings": ["2", "4,624", "0.1"],
        "norms": ["3", "48", "0"],
    }


def test_the_step_and_the_run_are_counted(recipe, page):
    assert "step: 4 samples x 32 = 128 tokens, as 2 micro-batches of 2 on each of 1 data-parallel ranks" in page
    config = GPTConfig(vocab_size=257, n_layer=1, n_head=2, d_model=16, max_length=32)
    assert f"run: 6 steps, 768 tokens, {768 * flops_per_token(config, 32):.3g} FLOPs" in page
    assert "as 1 micro-batches of 2 on each of 2 data-parallel ranks" in check(recipe, "--devices", "2")


def test_an_endless_run_has_no_total(recipe):
    assert "\nrun: " not in check(recipe, "--trainer.max_steps", "-1")


def test_sharding_divides_the_memory_of_weights_gradients_and_states(recipe, page):
    parameters = 7744
    assert f"weights {4 * parameters / 1024:.3g} KiB, gradients {4 * parameters / 1024:.3g} KiB" in page
    assert f"optimizer states {8 * parameters / 1024:.3g} KiB" in page
    both = ["--devices", "2", "--trainer.strategy"]
    assert f"optimizer states {8 * parameters / 1024:.3g} KiB" in check(recipe, *both, "ddp")
    assert f"optimizer states {8 * parameters / 2 / 1024:.3g} KiB" in check(recipe, *both, "fsdp2")


def test_a_z_loss_needs_the_logits_of_an_fp32_head_whole(recipe):
    wide = ["--trainer.precision", "bf16-mixed", "--model.gpt.head_fp32", "true"]
    logits = 2 * 32 * 257
    assert f"logits {2 * logits / 1024:.3g} KiB" in check(recipe, *wide)
    assert f"logits {4 * logits / 1024:.3g} KiB" in check(recipe, *wide, "--model.z_loss", "1e-4")


def test_moments_in_8_bit_are_listed_and_counted(recipe):
    page = check(recipe, "--stability.eight_bit_adam.min_8bit_size", "1")
    # 257 x 16 and 32 x 16 embeddings; 12 x 16^2 in a block, in rows of 16 but for 16 rows of 64; 3 norms.
    size = 8 * (289 * 16 + 3 * 16) + 2 * 12 * 16**2 + 8 * (3 * 16 + 16 + 64 + 16)
    assert page.split("\nall ")[1].split()[2] == f"{size:,}"
    assert f"optimizer states {size / 1024:.3g} KiB" in page
    assert "32 bit: embedding" in page


def test_a_pattern_of_8_bit_adam_that_selects_nothing_is_a_problem(recipe):
    done = command("check", "--config", recipe, "--stability.eight_bit_adam.keep_32_bit", "[gpt.nothing]")
    assert done.code == 2
    assert "pattern 'gpt.nothing': matches no module" in done.err


def test_the_schedule_is_shown_at_its_milestones(page):
    shown = page.split("learning rate (cosine) by steps:\n")[1].split("\n\n")[0]
    assert [line.split(maxsplit=2) for line in shown.splitlines()] == [
        ["0", "0", "start"],
        ["2", "0.01", "warm-up ends"],
        ["51", "0.0055", "half-way through the decay"],
        ["100", "0.001", "decay ends"],
    ]


def test_active_features_are_shown_with_their_settings(page):
    assert "features: GradClip(max_norm=1.0" in page


def test_problems_between_the_parts_come_together(recipe, tmp_path):
    words = ["--devices", "3", "--model.gpt.vocab_size", "100", "--model.gpt.max_length", "16"]
    done = command("check", "--config", recipe, *words)
    assert done.code == 2
    assert done.err.splitlines() == [
        f"lit-stable check: {place(recipe, 'global_batch')}data.global_batch=4: must be a multiple of"
        " data.micro_batch=2 x 3 data-parallel ranks = 6; nearest legal value is 6.",
        "model.gpt.vocab_size=100: must be at least 257, the vocabulary of the data.",
        f"{place(recipe, 'sequence_length')}data.sequence_length=32: must be at most model.gpt.max_length=16.",
    ]


def test_missing_data_and_other_problems_come_together(tmp_path):
    recipe = write_recipe(tmp_path, model__gpt__max_length=16)
    write_store(tmp_path).rename(tmp_path / "elsewhere")
    done = command("check", "--config", recipe)
    assert done.code == 2
    first, second = done.err.splitlines()
    assert first.startswith(f"lit-stable check: {place(recipe, 'text')}data.sources.text={tmp_path / 'store'}: ")
    assert (
        second == f"{place(recipe, 'sequence_length')}data.sequence_length=32: must be at most model.gpt.max_length=16."
    )


def test_twins_are_found_without_training(recipe):
    words = ["--trainer.callbacks+", "GradClip", "--trainer.callbacks.max_norm", "2"]
    done = command("check", "--config", recipe, *words)
    assert (done.code, "would act twice" in done.err) == (2, True)


def test_the_devices_of_the_recipe_need_not_be_here_and_nothing_is_written(tmp_path):
    trainer = {"trainer__accelerator": "gpu", "trainer__devices": 8, "trainer__precision": "bf16-mixed"}
    recipe = write_recipe(tmp_path, data__global_batch=16, **trainer)
    check(recipe, "--trainer.strategy", "fsdp2")
    assert not (tmp_path / "runs").exists()


def test_paths_are_checked_also_beside_a_built_in_source(recipe, tmp_path):
    sources = '{wiki: {path: /nonexistent}, b: {path: "builtin:nope"}, c: {path: "builtin:python-stdlib"}}'
    done = command("check", "--config", recipe, "--data.sources", sources, "--data.validation", "{v: /nowhere}")
    assert done.code == 2
    assert "data.sources.wiki=/nonexistent: " in done.err
    assert "data.sources.b=builtin:nope: no such corpus" in done.err
    assert "data.validation.v=/nowhere: " in done.err
