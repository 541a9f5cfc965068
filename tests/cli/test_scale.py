"""A full-size experiment as a toy, value by value."""

from __future__ import annotations

import inspect
from fractions import Fraction
from typing import Any

import pytest

from lit_stable.cli.features import FEATURES
from lit_stable.cli.scale import QUANTITIES, Factors, factors, scaled

# 200 times fewer steps, batches of a 64th, lengths of a 32nd: samples / 12,800 and tokens / 409,600.
DIVISORS = Factors(Fraction(200), Fraction(64), Fraction(32), micro_batch=2, full_batch=32, full_length=64)


def nested(key: str, value: Any, unit: str | None = None) -> dict[str, Any]:
    *groups, last = key.split(".")
    node: dict[str, Any] = {last: value, **({} if unit is None else {"unit": unit})}
    for part in reversed(groups):
        node = {part: node}
    return node


@pytest.mark.parametrize(
    ("key", "unit", "value", "expected"),
    [
        ("trainer.max_steps", None, 20_000, 100),
        ("validate_every", None, 4000, 20),
        ("validate_every", None, 1000, 10),  # and not 5: ten steps apart
        ("validate_every", None, 7, None),  # unless the experiment's were closer
        ("validate_every", None, "1.28M samples", "320 samples"),
        ("validate_every", None, "4B tokens", "20480 tokens"),
        ("validate_every", None, "40B tokens", "97656 tokens"),
        ("checkpoints.every_steps", None, 300, 2),  # 1.5, halves up
        ("checkpoints.every_steps", None, "1.28M samples", "100 samples"),
        ("checkpoints.first_step", None, 10, 1),  # 0.05, never 0
        ("data.global_batch", None, 2048, 32),
        ("data.sequence_length", None, 2048, 64),
        ("data.skip_steps", None, ["13251-14000", 401], ["67-70", "3-3"]),
        ("data.order.reshuffle", None, {"115_500 steps": 7, "6M samples": 8}, {"578 steps": 7, "469 samples": 8}),
        ("data.weight_schedule.marks", None, {"0": {"a": 1}, "40M": {"a": 2}}, {"0": {"a": 1}, "3125": {"a": 2}}),
        ("data.weight_schedule.marks", "tokens", {0: {"a": 1}, "2B": {"a": 2}}, {"0": {"a": 1}, "4883": {"a": 2}}),
        ("model.gpt.embed_grad_shrink", None, 0.1, None),
        ("model.gpt.embed_grad_shrink", None, [[6000, 0.1], [6500, 1.0]], [[30, 0.1], [33, 1.0]]),
        ("model.gpt.max_length", None, 2048, 64),
        ("model.schedule.warmup", None, 1800, 9),
        ("model.schedule.warmup", "samples", "216_320", 17),
        ("model.schedule.warmup", "tokens", "375M", 916),
        ("model.schedule.warmup", "tokens", 0, None),
        ("model.schedule.horizon", "samples", 126_953_125, 9918),
        ("model.schedule.cooldown", None, 0.2, None),
        ("model.schedule.cooldown", None, "2k", 10),
        ("stability.batch_size_warmup.ramp", None, "16 16 6_000_000", [2, 2, 469]),
        ("stability.batch_size_warmup.ramp", None, [192, 128, 9_765_625], [4, 2, 763]),
        ("stability.batch_size_warmup.ramp", None, "1024 for 7200 steps then 2048", "16 for 36 steps then 32"),
        (
            "stability.batch_size_warmup.ramp",
            None,
            [{"batch": 1024, "samples": "6M"}, {"batch": 2048}],
            [{"batch": 16, "samples": 469}, {"batch": 32}],
        ),
        (
            "stability.batch_size_warmup.ramp",
            None,
            "512 doubling at 168B, 337B tokens",
            "8 for 410156 tokens then 16 for 412598 tokens then 32",
        ),
        (
            "stability.grad_clip.schedule",
            None,
            [{"from": 0, "max_norm": 2.5}, {"from": 90, "max_norm": 1.5}, {"from": 180, "max_norm": 1.0}],
            [{"from": 0, "max_norm": 2.5}, {"from": 1, "max_norm": 1.5}, {"from": 2, "max_norm": 1.0}],
        ),
        (
            "stability.layer_norm_freeze.rules",
            "samples",
            [{"modules": ["*"], "start": 12_800, "stop": 12_801}, {"stop": 25_600}],
            [{"modules": ["*"], "start": 1, "stop": 2}, {"stop": 2}],
        ),
        ("stability.lr_override.start", None, 115_500, 578),
        ("stability.lr_override.schedule", None, [[0, 0.0], [1800, 6e-5]], [[0, 0.0], [9, 6e-5]]),
        ("stability.optimizer_reset.start", "samples", 7_594_208, 593),
        ("stability.optimizer_reset.hold_steps", None, 100, 1),
        ("stability.scripted_skip.steps", None, ["13251-14000"], ["67-70"]),
        ("stability.sequence_length_warmup.shape", None, "linear", None),
        ("stability.sequence_length_warmup.shape", None, "64 for 1000 steps then 2048", "2 for 5 steps then 64"),
        ("stability.sequence_length_warmup.multiple_of", None, 8, 1),
        ("stability.sequence_length_warmup.min_length", None, 64, 2),
        ("stability.sequence_length_warmup.total_steps", None, 36_000, 180),
    ],
)
def test_a_quantity_is_divided_as_its_unit_is(key, unit, value, expected):
    layer, lines = scaled(nested(key, value, unit), DIVISORS)
    assert layer == ({} if expected is None else nested(key, expected))
    assert lines == ([] if expected is None else [f"{key}: {value} -> {expected}"])


def test_a_ramp_that_is_steeper_than_the_toy_keeps_room_and_reaches_the_full_batch():
    divisors = Factors(Fraction(1), Fraction(64), Fraction(1), micro_batch=8, full_batch=32)
    layer, _ = scaled(nested("stability.batch_size_warmup.ramp", [1984, 64, 64_000]), divisors)
    assert layer == nested("stability.batch_size_warmup.ramp", [24, 8, 1000])
    # 4 up to 32 by at most 6: the largest multiple of 2 that divides 28 is 4.
    divisors = Factors(Fraction(1), Fraction(64), Fraction(1), micro_batch=2, full_batch=32)
    layer, _ = scaled(nested("stability.batch_size_warmup.ramp", [256, 384, 64_000]), divisors)
    assert layer == nested("stability.batch_size_warmup.ramp", [4, 4, 1000])


def test_a_feature_that_is_given_as_a_class_is_scaled_below_its_arguments():
    recipe = nested("stability.optimizer_reset", {"class_path": "X", "init_args": {"start": 400, "hold_steps": 400}})
    layer, _ = scaled(recipe, DIVISORS)
    assert layer == nested("stability.optimizer_reset", {"init_args": {"start": 2, "hold_steps": 2}})


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        nested("stability.grad_clip", None),
        nested("stability.batch_size_warmup.ramp", "many"),
        nested("stability.grad_clip.schedule", "soon"),
        nested("trainer.max_steps", "long"),
        nested("model.schedule.warmup", 5, "hours"),
        {"trainer": 5},
    ],
)
def test_what_is_off_or_cannot_be_read_is_left_to_the_parser(recipe):
    assert scaled(recipe, DIVISORS) == ({}, [])


def test_a_warm_up_that_counts_something_else_than_the_decay_is_scaled_as_that():
    recipe = {"model": {"schedule": {"warmup": 216_320, "warmup_unit": "samples", "horizon": "1B", "unit": "tokens"}}}
    layer, _ = scaled(recipe, DIVISORS)
    assert layer == {"model": {"schedule": {"warmup": 17, "horizon": 2441}}}


def test_a_recipe_is_not_changed_by_scaling_it():
    recipe = nested("stability.grad_clip.schedule", [{"from": 400, "max_norm": 1.0}])
    scaled(recipe, DIVISORS)
    assert recipe == nested("stability.grad_clip.schedule", [{"from": 400, "max_norm": 1.0}])


BIG = {"trainer": {"max_steps": 20_000}, "data": {"global_batch": 2048, "sequence_length": 2048, "micro_batch": 4}}


def test_divisors_are_what_brings_the_experiment_down_to_the_targets():
    found = factors(BIG, {"max_steps": 120, "global_batch": 16, "sequence_length": 64}, micro_batch=2)
    assert found == Factors(Fraction(500, 3), Fraction(128), Fraction(32), 2, 16, 64)
    assert [found.of(unit) for unit in ("samples", "tokens")] == [Fraction(64_000, 3), Fraction(2_048_000, 3)]
    assert str(found) == "steps / 166.667, batch / 128, length / 32, samples / 21,333.3, tokens / 682,667"
    assert found.scale(20_000, "steps") == 120


def test_what_is_not_named_or_is_small_already_stays():
    assert factors(BIG, {"max_steps": 100}) == Factors(
        steps=Fraction(200), micro_batch=4, full_batch=2048, full_length=2048
    )
    assert factors(BIG, {"max_steps": 30_000, "global_batch": 4096}) == Factors(
        micro_batch=4, full_batch=2048, full_length=2048
    )


def test_every_target_that_cannot_be_met_is_named():
    with pytest.raises(ValueError, match=r"scale.max_steps: the recipes before this one set no trainer.max_steps") as e:
        factors({"data": {"global_batch": 64, "micro_batch": 4}}, {"max_steps": 10, "global_batch": 6})
    assert str(e.value).splitlines()[1] == "scale.global_batch: 6 must be a multiple of data.micro_batch=4."


def test_every_feature_that_counts_in_units_is_scaled():
    counted = {name for name, feature in FEATURES.items() if "unit" in inspect.signature(feature.__init__).parameters}
    assert counted <= {key.split(".")[1] for key in QUANTITIES if key.startswith("stability.")}
