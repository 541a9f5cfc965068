"""`scale` and `stand_in` in recipe files: what reaches the parser, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tiny_recipe import command, write_recipe

from lit_stable.cli.command import Command
from lit_stable.cli.directives import merge
from lit_stable.cli.recipe import Expanded, expand_arguments
from lit_stable.cli.recipe_file import RecipeError

EXPERIMENT = """\
trainer: {max_steps: 1000}
data: {global_batch: 64, micro_batch: 4, sources: {web: {path: /nowhere, weight: 3}}}
model: {schedule: {warmup: 100}}
"""
TOY = """\
scale: {max_steps: 100, global_batch: 8}
stand_in: builtin:python-stdlib
data: {micro_batch: 2}
validate_every: 7
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(**texts):
        for name, text in texts.items():
            Path(f"{name}.yaml").write_text(text)

    return write


def configs(expanded: Expanded) -> list[dict]:
    return [yaml.safe_load(text) for text in expanded.argv[1::2]]


def test_scaled_values_stand_before_the_fragment_and_stand_ins_behind_all(write):
    write(exp=EXPERIMENT, toy=TOY, more="data: {num_workers: 0}")
    found = expand_arguments(["--config", "exp.yaml", "--config", "toy.yaml", "-c", "more.yaml"])
    stand_in = {"web": {"path": "builtin:python-stdlib", "weight": 3}}
    assert configs(found) == [
        yaml.safe_load(EXPERIMENT),
        {"trainer": {"max_steps": 100}, "data": {"global_batch": 8}, "model": {"schedule": {"warmup": 10}}},
        {"data": {"micro_batch": 2}, "validate_every": 7},
        {"data": {"num_workers": 0}},
        {"data": {"sources": stand_in}},
    ]
    assert found.notes == [
        "scaled for toy: steps / 10, batch / 8, samples / 80, tokens / 80",
        "  trainer.max_steps: 1000 -> 100",
        "  data.global_batch: 64 -> 8",
        "  model.schedule.warmup: 100 -> 10",
        "data.sources.web.path: /nowhere -> builtin:python-stdlib (not on disk)",
    ]


def test_options_on_the_command_line_come_last_and_are_not_scaled(write):
    write(exp=EXPERIMENT, toy=TOY)
    argv = expand_arguments(["-c", "exp.yaml", "-c", "toy.yaml", "--trainer.max_steps", "5"]).argv
    assert argv[-2:] == ["--trainer.max_steps", "5"]


def test_a_base_may_be_a_size_too(write):
    write(exp=EXPERIMENT, toy=TOY, small="base: [exp.yaml, toy.yaml]\nvalidate_every: 3")
    assert configs(expand_arguments(["-c", "small.yaml"]))[1]["trainer"] == {"max_steps": 100}


def test_a_run_is_named_after_the_experiment_and_its_size(write):
    write(exp=EXPERIMENT, toy=TOY)

    def name(*words):
        return Command("fit", [], *expand_arguments(words)).default_name

    assert name("-c", "exp.yaml") == "exp"
    assert name("-c", "exp.yaml", "-c", "toy.yaml") == "exp-toy"
    assert name() == "run"


def test_runs_of_shipped_recipes_that_share_a_name_are_told_apart_by_their_folder(write):
    def name(*words):
        return Command("fit", [], *expand_arguments(words)).default_name

    assert name("-c", "tr8b_embed_norm/exp1", "-c", "sizes/tiny") == "tr8b_embed_norm-exp1-tiny"
    assert name("-c", "tr8b_curriculum/exp1") == "tr8b_curriculum-exp1"
    assert name("-c", "bloomberggpt/v1.0") == "v1.0"
    write(exp1=EXPERIMENT)
    assert name("-c", "exp1.yaml") == "exp1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nscale: {max_step: 3}", "toy.yaml:2: scale.max_step: is no option; nearest is scale.max_steps."),
        ("scale: {qqq: 3}", "scale.qqq: is no option; there are max_steps, global_batch, sequence_length."),
        ("scale: {max_steps: 0}", "scale.max_steps: must be a whole number of at least 1, not 0."),
        ("scale: {max_steps: true}", "scale.max_steps: must be a whole number of at least 1, not True."),
        ("scale: 5", "scale: must hold at least one of max_steps, global_batch, sequence_length, not 5."),
        ("scale: {}", "scale: must hold at least one of max_steps, global_batch, sequence_length, not {}."),
        ("stand_in: [a]", "stand_in: must be a path or builtin:python-stdlib, not ['a']."),
        ("\nscale: {max_steps: 3}", "toy.yaml:2: scale.max_steps: the recipes before this one set no trainer.max_st"),
    ],
)
def test_a_directive_that_cannot_be_followed_is_refused_with_its_line(write, text, message):
    write(toy=text)
    with pytest.raises(RecipeError) as caught:
        expand_arguments(["-c", "toy.yaml"])
    assert message in str(caught.value)


def test_merging_goes_by_key_and_takes_lists_and_the_users_own_keys_whole():
    below = {"a": {"x": 1, "l": [1]}, "data": {"sources": {"a": 1}, "n": 1}, "f": {"x": 1}}
    over = {"a": {"y": 2, "l": [2]}, "data": {"sources": {"b": 2}}, "f": None}
    merged = {"a": {"x": 1, "y": 2, "l": [2]}, "data": {"sources": {"b": 2}, "n": 1}, "f": None}
    assert merge(below, over) == merged
    assert below["a"] == {"x": 1, "l": [1]}


def test_an_experiment_that_is_not_on_this_machine_trains_as_a_toy(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_STABLE_CACHE", str(tmp_path / "cache"))
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    experiment = write_recipe(
        prepared,
        data__global_batch=32,
        data__sequence_length=64,
        model__gpt__max_length=64,
        trainer__max_steps=40,
        stability={"batch_size_warmup": {"ramp": "8 8 128"}, "sequence_length_warmup": None},
    )
    recipe = yaml.safe_load(experiment.read_text())
    store = recipe["data"]["sources"]["text"]["path"]
    experiment.write_text(
        yaml.safe_dump(
            {
                **recipe,
                "data": {**recipe["data"], "sources": {"pile": {"path": "/none", "weight": 2}, "c4": {"path": "/no"}}},
            }
        )
    )
    toy = tmp_path / "toy.yaml"
    toy.write_text(f"scale: {{max_steps: 4, global_batch: 8, sequence_length: 32}}\nstand_in: {store}\n")
    done = command("fit", "--config", experiment, "--config", toy)
    assert done.code == 0, done.err
    run = prepared / "runs" / "tiny-toy" / "0001"
    said = (run / "start-01.txt").read_text()
    for line in (
        "scaled for toy: steps / 10, batch / 4, length / 2, samples / 40, tokens / 80",
        "  stability.batch_size_warmup.ramp: 8 8 128 -> [2, 2, 3]",
        f"data.sources.pile.path: /none -> {store} (not on disk)",
    ):
        assert f"{line}\n" in said
        assert f"{line}\n" in done.out
        assert f"{line}\n" in command("check", "--config", experiment, "--config", toy).out
    stored = yaml.safe_load((run / "recipe-01.yaml").read_text())
    assert stored["data"]["sources"]["pile"] == {"path": store, "weight": 2.0, "filter": None}
    assert stored["trainer"]["max_steps"] == 4
    # What was stored is the toy: it is not scaled again.
    again = command("check", "--config", run / "recipe-01.yaml")
    assert again.code == 0, again.err
    assert "scaled" not in again.out
