"""The documents' runs at full size: parts, parameters, schedules, initial weights, by the published numbers."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from recipe_values import built, parsed
from row_values import ROW_VALUES
from tiny_recipe import command

from lit_stable.cli.construction import construction_problems
from lit_stable.cli.trace import Trace, trace
from lit_stable.model.formulas import parameter_count

FRAGMENTS = ("hf_vlm/language_shape", "hf_vlm/pairs")
LAID_OVER = [name for name in ROW_VALUES if name.startswith("sizes/") and name != "sizes/llama_8b"]
WHOLE = [name for name in ROW_VALUES if name not in (*LAID_OVER, *FRAGMENTS)]


@cache
def rows(name: str, steps: int) -> Trace:
    """The first iterations of a recipe."""
    parts = built(name)
    features = [feature for feature in vars(parts.stability).values() if feature]
    for feature in features:
        if hasattr(feature, "adopt"):
            feature.adopt(parts.data)
    model, data = parts.model, parts.data
    decay = model.optimizer_options.weight_decay
    return trace(model.schedule, decay, data.global_batch, data.sequence_length, features, steps)


def config(name: str) -> Any:
    return built(name).model.config


@pytest.mark.parametrize("name", WHOLE)
def test_every_part_of_a_recipe_can_be_built(name):
    assert construction_problems(parsed(name)) == []


@pytest.mark.parametrize("name", LAID_OVER)
def test_a_size_can_be_laid_over_an_experiment(name):
    assert construction_problems(parsed("tr8b_embed_norm/exp6", name)) == []


@pytest.mark.parametrize("name", [name for name in WHOLE if not name.startswith(("sizes/", "hf_vlm/"))])
def test_a_run_is_laid_out_as_a_toy(name):
    assert construction_problems(parsed(name, "sizes/tiny")) == []


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("bloomberggpt/v2.0", 50.56e9),
        ("tr8/exp01", 56.7e9),
        ("tr8/exp12", 103.96e9),
        ("tr8b_bitsandbytes/exp1", 103.96e9),
        ("bloom/176b", 176_247_271_424),
        ("sizes/llama_8b", 8_030_261_248),
    ],
)
def test_parameters_are_those_published(name, published):
    assert abs(parameter_count(config(name)) / published - 1) < 1e-3


def test_the_mlp_that_stayed_behind_is_refused():
    done = command("check", "--config", "tr8/exp06", "--model.gpt.d_ff", "20480")
    assert done.code == 2
    assert "published.d_ff_ratio=4: model.gpt.d_ff=20480 is 1.25 x d_model=16384; it must be 65536." in done.err
    # So would experiment 1 have been.
    assert "it must be 65536" in command("check", "--config", "tr8/exp01", "--published.d_ff_ratio", "4").err


@pytest.mark.parametrize(("deep", "shallow"), [("19m_deep", "19m_shallow"), ("42m_deep", "42m_shallow")])
def test_deep_and_shallow_have_equally_many_parameters_in_their_layers(deep, shallow):
    sizes = [built("quickstart", f"sizes/{name}").model.config for name in (deep, shallow)]
    assert len({size.n_layer * size.d_model**2 for size in sizes}) == 1
    assert [size.head_size for size in sizes] == [64, 64]


@pytest.mark.parametrize(("name", "millions"), [("10m", 10), ("60m", 60), ("124m", 124), ("350m", 350), ("1.3b", 1310)])
def test_a_size_has_the_parameters_that_it_is_named_after(name, millions):
    assert parameter_count(built("gpt_1b3", f"sizes/{name}").model.config) == pytest.approx(millions * 1e6, rel=0.02)


def test_check_tells_parameters_memory_and_milestones_of_a_run_over_512_devices():
    done = command("check", "--config", "bloomberggpt/v2.0")
    assert done.code == 0, done.err
    for text in (
        "parameters: 50,558,868,480",
        "published: 50.56B parameters",
        "as 2 micro-batches of 2 on each of 512 data-parallel ranks",
        "memory per device, estimated: 18.9 GiB",
        "run: 139,200 steps, 568,747,622,400 tokens",
        "batches have their last size, 2048",
    ):
        assert text in done.out


# -- golden values (G1 to G5) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tr8/exp12", "tr8b_bitsandbytes/exp1", "tr8b_embed_norm/exp1"])
def test_g1_the_ramp_meets_every_log_line(name):
    found = rows(name, 17_060)
    lines = {6502: (216_960, 80), 7000: (260_912, 96), 8600: (464_560, 160), 11_446: (1_255_856, 432)}
    lines |= {12_000: (1_519_744, 528), 14_000: (3_014_320, 1024), 16_022: (6_000_864, 2032), 17_060: (8_126_688, 2048)}
    assert {step: (found[step - 1].samples, found[step - 1].batch) for step in lines} == lines


def test_g1_the_ramp_of_bloom():
    found = rows("bloom/176b", 12_695)
    assert (found[12_657].samples, found[12_658].batch, found[12_694].samples) == (9_765_808, 2048, 9_841_584)


def test_g2_the_override_of_bitsandbytes_6():
    found = rows("tr8b_bitsandbytes/exp6", 12_001)
    assert [f"{row.lr:.4e}" for row in found[11_998:]] == ["5.9986e-05", "5.8415e-05", "5.8414e-05"]


def test_g2_the_rate_at_the_rollback_of_embedding_norm_6_and_what_the_reset_makes_of_it():
    found = rows("tr8b_embed_norm/exp6", 16_901)
    assert (found[16_799].samples, found[16_799].lr) == (7_594_208, 0.0)
    assert {row.lr for row in found[16_799:16_899]} == {0.0}
    assert found[16_899].samples == 7_799_008
    assert (f"{found[16_798].lr:.4e}", f"{found[16_899].lr:.3e}") == ("5.9550e-05", "5.952e-05")


def test_g3_the_lengths_of_the_curriculum():
    found = rows("tr8b_curriculum/exp1", 36_000)
    used = {step: found[step - 1].length for step in (145, 146, 500, 1831, 15_000, 18_000, 36_000)}
    assert used == {145: 64, 146: 72, 500: 88, 1831: 160, 15_000: 888, 18_000: 1056, 36_000: 2048}
    assert [f"{found[step - 1].tokens / 1e9:.1f}" for step in (15_000, 18_000, 36_000)] == ["14.5", "20.5", "77.6"]


def test_c02_and_c03_the_warm_up_counts_samples_under_growing_lengths():
    first, second = rows("tr8b_curriculum/exp1", 36_000), rows("tr8b_curriculum/exp2", 1832)
    assert (first[104].lr < 6e-5, f"{first[105].lr:.3e}") == (True, "6.000e-05")
    assert second[914].lr == pytest.approx(1e-4 * 915 * 2048 / 3_750_000)  # half-way in samples, not in tokens
    assert (second[1829].lr < 1e-4, second[1831].lr) == (True, pytest.approx(1e-4, rel=1e-5))


def test_n14_the_rate_lags_the_samples_by_the_overflows():
    found = rows("tr8b_bitsandbytes/exp1_overflows", 6503)
    assert (found[6501].lr < 6e-5, f"{found[6502].lr:.4e}") == (True, "6.0000e-05")


def test_b24_and_b29_warm_up_and_batches_of_bloomberggpt():
    found = rows("bloomberggpt/v2.0", 7201)
    assert (found[899].lr, found[1799].lr) == (3e-5, 6e-5)
    assert [row.samples for row in found[7199:]] == [7200 * 1024, 7200 * 1024 + 2048]


@pytest.mark.parametrize(
    ("name", "start", "ratio"),
    [
        ("v1.1", 10_800, 0.8),
        ("v1.2", 20_100, 0.6),
        ("v2.5", 137_100, 1 / 6),
    ],
)
def test_b15_an_override_scales_the_rate_and_keeps_the_phase(name, start, ratio):
    schedule = built(f"bloomberggpt/{name}").model.schedule
    found = rows(f"bloomberggpt/{name}", start + 100)
    for step in (start + 1, start + 100):
        assert found[step - 1].lr == pytest.approx(ratio * schedule.lr(step), rel=1e-12)
    assert found[start - 2].lr == schedule.lr(start - 1)


def test_b12_and_o15_the_clipping_norm_changes_at_its_step():
    found = rows("bloomberggpt/v1.2", 20_200)
    assert [row.clip for row in found[20_098:20_101]] == [1.0, 0.3, 0.3]
    found = rows("opt/11_clip", 5501)
    assert [found[step - 1].clip for step in (3999, 4000, 5499, 5500)] == [2.5, 1.5, 1.5, 1.0]


def test_b18_the_decay_changes_at_its_step():
    found = rows("bloomberggpt/v2.6", 129_901)
    assert [row.weight_decay for row in found[129_898:]] == [0.1, 0.01, 0.01]


def test_g5_the_formulas_of_initial_weights():
    assert math.isclose(config("bloomberggpt/v2.0").std, 0.006588, rel_tol=1e-4)
    assert math.isclose(math.sqrt(2 / (5 * config("tr8/exp11").d_model)), 0.0058722, rel_tol=1e-5)
    assert round(math.sqrt(2 / (5 * config("tr8/exp11").d_model)), 3) == config("tr8/exp11").init_std
    assert round(math.sqrt(1 / (3 * config("bloom/176b").d_model)), 4) == config("bloom/176b").init_std
    stable = config("tr8b_bitsandbytes/exp1")
    assert math.isclose(math.sqrt(6 / (stable.vocab_size + stable.d_model)), 0.0098488, rel_tol=1e-5)
