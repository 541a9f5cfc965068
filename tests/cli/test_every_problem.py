"""All kinds of problems of one bad recipe, in one message."""

from __future__ import annotations

import pytest
from recipe_values import Parsing
from tiny_recipe import command, write_recipe


def test_wrong_keys_options_and_parts_come_together_each_with_its_place(tmp_path):
    base = write_recipe(tmp_path)
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(
        "base: tiny.yaml\n"
        "model:\n"
        "  gpt: {n_layr: 3, n_head: x}\n"
        "  schedule:\n"
        "    floor: 0.5\n"
        "data:\n"
        "  micro_batch: 3\n"
        "stability:\n"
        "  detectors:\n"
        "    spik: {x: 3}\n"
        "  grad_clip: {max_norm: 0}\n"
        "  eight_bit_adam: {block_wise: true, percentile_clipping: 5}\n"  # bitsandbytes had them
    )
    done = command("fit", "--config", recipe, "--stability.detectors.spik.x", "3", "--model.optimizer.eps", "0")
    assert done.code == 2
    assert done.err.removeprefix("lit-stable fit: ").splitlines() == [
        f"{recipe}:3: model.gpt.n_layr: is no option; nearest is model.gpt.n_layer.",
        f"{recipe}:3: model.gpt.n_head: must be an int, not 'x'.",
        f"{recipe}:10: stability.detectors.spik: is no option; nearest is spike.",
        *(
            f"{recipe}:12: stability.eight_bit_adam.{gone}: is no option; there are bits, min_8bit_size,"
            " embedding_bits, keep_32_bit, state_map, on_load."
            for gone in ("block_wise", "percentile_clipping")
        ),
        "--stability.detectors.spik.x: spik is no option here; nearest is spike.",
        f"{recipe}:5: model.schedule.floor=0.5: must lie between 0 and schedule.peak=0.01.",
        "model.optimizer.eps=0.0: must be > 0.",
        f"{recipe}:7: data.micro_batch=3: must divide data.global_batch=4; nearest legal values are 2 and 4.",
        f"{recipe}:11: `GradClip(max_norm=0.0)`: must be a finite number > 0.",
    ]
    assert base.exists()


def test_what_is_missing_because_it_is_wrong_is_not_named_twice(tmp_path):
    recipe = write_recipe(tmp_path, model__schedule={"peak": "high", "horizon": 10}, data__micro_batch=3)
    done = command("check", "--config", recipe)
    wrong, other = done.err.splitlines()
    assert wrong.endswith("model.schedule.peak: must be a float, not 'high'.")
    assert "data.micro_batch=3: must divide data.global_batch=4" in other


def test_what_is_missing_elsewhere_is_named_behind_what_is_wrong(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {schedule: {peek: 1}}\n")
    lines = command("check", "--config", recipe).err.splitlines()
    assert "model.schedule.peek: is no option; nearest is model.schedule.peak." in lines[0]
    assert lines[1].endswith(": missing; set in a recipe or on the command line.")
    assert "model.schedule.peak" in lines[1]


def test_what_is_missing_hides_nothing_that_shows_when_parts_are_built(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "stability: {grad_clip: {max_norm: -1}}\n"
        "graceful_stop: {also: [SIGKILL]}\n"
        "checkpoints: {every_steps: 0}\n"
        "model: {gpt: {n_layer: 2, n_head: 3, d_model: 32}, schedule: {horizon: 10}}\n"
    )
    lines = command("check", "--config", recipe).err.removeprefix("lit-stable check: ").splitlines()
    lacking = "model.schedule.peak, data.sources, data.sequence_length, data.micro_batch, data.global_batch"
    assert lines[0] == f"{lacking}: missing; set in a recipe or on the command line."
    told = "\n".join(lines[1:])
    for place in ("4: model.gpt.d_model=32", "3: checkpoints.every_steps=0", "2: `GracefulStop(", "1: `GradClip("):
        assert f"{recipe}:{place}" in told, told
    assert len(lines) == 5, told


def test_a_default_in_the_place_of_a_wrong_value_is_no_problem(tmp_path):
    recipe = write_recipe(tmp_path, model__gpt__n_head="x", model__schedule__floor=0.5)  # 12 heads divide no 16
    lines = command("check", "--config", recipe).err.splitlines()
    assert len(lines) == 2
    assert "model.schedule.floor=0.5" in lines[1]


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "quickstart", "--trainer.max_steps", "7", "--stability.lr_override", "{factor: 0.5, start: 3}"],
        ["--config", "hf_vlm/captions", "--trainer.callbacks+=lightning.pytorch.callbacks.Timer"],
        ["--config", "gpt2_124m", "--stability.extra", "{one: {class_path: lit_stable.callbacks.EffectiveLR}}"],
    ],
)
def test_arguments_are_parsed_once_and_to_what_the_whole_parser_makes_of_them(words):
    cli = Parsing(*words)
    whole = cli.parser.parse_args(["fit", *cli.command.argv])
    assert whole.pop("config") is None
    assert cli.config == whole
    assert list(cli.config.keys()) == list(whole.keys())


def test_what_is_wrong_with_a_text_hides_nothing_of_what_it_says(tmp_path):
    write_recipe(tmp_path)
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(
        "base: tiny.yaml\n"
        "config: other.yaml\n"
        "model:\n"
        "  gpt: {n_layr: 3}\n"
        "trainer: {max_steps: 4, max_steps: 5}\n"
        "stand_in: 3\n"
        "stability: {grad_clip: {max_norm: 0}}\n"
    )
    done = command("fit", "--config", recipe, "--data.micro_bach", "1")
    assert done.code == 2
    assert done.err.removeprefix("lit-stable fit: ").splitlines() == [
        f"{recipe}:5: trainer.max_steps: stands on line 5 already; keep one.",
        f"{recipe}:2: config: is for the command line; inherit with `base:`.",
        f"{recipe}:6: stand_in: must be a path or builtin:python-stdlib, not 3.",
        f"{recipe}:4: model.gpt.n_layr: is no option; nearest is model.gpt.n_layer.",
        "--data.micro_bach: is no option; nearest is --data.micro_batch.",
        f"{recipe}:7: `GradClip(max_norm=0.0)`: must be a finite number > 0.",
    ]


@pytest.mark.parametrize("lost", ["base: lost.yaml\n", "base: 3\n", "base: broken.yaml\n"])
def test_beside_a_recipe_that_cannot_be_read_wrong_keys_are_named_and_nothing_is_said_to_lack(tmp_path, lost):
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(f"{lost}model:\n  gpt: {{n_layr: 3}}\n")
    lines = command("fit", "--config", recipe).err.splitlines()
    assert lines[1:] == [f"{recipe}:3: model.gpt.n_layr: is no option; nearest is model.gpt.n_layer."]
