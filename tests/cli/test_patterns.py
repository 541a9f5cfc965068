"""Patterns of a recipe are tried on the model before anything is trained."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from tiny_recipe import command, write_recipe

from lit_stable.cli.patterns import optimizer_options, refuse_idle_patterns
from lit_stable.model import gpt as gpt_file
from lit_stable.model.config import GPTConfig
from lit_stable.optim.options import OptimizerOptions, PatternOptions

GPT = asdict(GPTConfig(vocab_size=50, n_layer=2, n_head=2, d_model=8, max_length=4))
OPTIMIZER = asdict(OptimizerOptions())


def test_patterns_of_a_recipe_become_options():
    options = optimizer_options({**OPTIMIZER, "patterns": {"wte.*": {"lr_factor": 0.5, "weight_decay": None}}})
    assert options == OptimizerOptions(patterns={"wte.*": PatternOptions(lr_factor=0.5)})


def test_idle_patterns_of_both_kinds_are_told_at_once():
    gpt = {**GPT, "init_overrides": {"head.weight": 0.1, "wte.weight": 0.1}}
    optimizer = {**OPTIMIZER, "patterns": {"blocks.7.*": {"lr_factor": 0.5}, "wte.*": {"lr_factor": 0.5}}}
    with pytest.raises(ValueError, match="matches no matrix") as error:
        refuse_idle_patterns(gpt, optimizer)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("model.gpt.init_overrides.head.weight: matches no matrix of this model, which has ")
    assert lines[1].startswith("model.optimizer.patterns.blocks.7.*: is left with no trainable parameter; the names ")


def test_patterns_that_match_pass_and_without_patterns_nothing_is_built(monkeypatch):
    refuse_idle_patterns({**GPT, "init_overrides": {"blocks.*": 0.1}}, OPTIMIZER)
    monkeypatch.setattr(gpt_file.GPT, "__init__", lambda *args: pytest.fail("was built"))
    refuse_idle_patterns(GPT, OPTIMIZER)


def test_wrong_options_are_left_to_those_who_tell_of_them():
    refuse_idle_patterns({**GPT, "n_head": 3, "init_overrides": {"nothing": 0.1}}, OPTIMIZER)


def test_a_recipe_with_idle_patterns_is_refused_with_every_other_problem(tmp_path):
    recipe = write_recipe(
        tmp_path,
        model__gpt__init_overrides={"wte.weigth": "xavier"},
        model__optimizer={"patterns": {"blocks.9.*": {"lr_factor": 0.5}}},
        model__z_loss=-1.0,
        model__gradient_predivide=0.0,
        checkpoints__every_steps=0,
    )
    done = command("check", "--config", recipe)
    assert done.code == 2
    for problem in (
        "model.gpt.init_overrides.wte.weigth: matches no matrix",
        "model.optimizer.patterns.blocks.9.*: is left with no trainable parameter",
        "model.z_loss=-1.0: must be a finite number >= 0.",
        "model.gradient_predivide=0.0: must be a finite number > 0, or null.",
        "checkpoints.every_steps=0",
    ):
        assert problem in done.err


def test_a_recipe_with_all_kinds_of_options_trains_and_says_how_attention_runs(tmp_path):
    recipe = write_recipe(
        tmp_path,
        model__gpt__position="alibi",
        model__gpt__stable_embedding=True,
        model__gpt__document_mask=True,
        model__gpt__embed_grad_shrink=[[1, 0.1], [4, 1.0]],
        model__gpt__init_overrides={"blocks.*.mlp.up.*": 0.05},
        model__optimizer={"decay": "independent", "patterns": {"wte.*": {"lr_factor": 0.5}}},
        model__z_loss=1e-4,
    )
    done = command("fit", "--config", recipe, "--trainer.max_steps", "2")
    assert done.code == 0, done.err
    assert "attention: scaled_dot_product_attention, flash kernel, with a mask of all scores\n" in done.out
    assert "initial weights: 9 tensors measured, 0 not as declared" in done.out
    assert "embeddings of wte.*" in done.out
