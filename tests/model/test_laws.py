"""By which law each parameter starts: golden values, patterns, and the refusal of those that match nothing."""

from __future__ import annotations

import math

import pytest
import torch

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.laws import Law, law_of, sinusoids


def config(**fields) -> GPTConfig:
    return GPTConfig(**{"vocab_size": 100, "n_layer": 2, "n_head": 2, "d_model": 32, "max_length": 16, **fields})


def test_xavier_bound_of_the_104b_embedding_is_the_golden_value():
    options = config(d_model=11600, n_head=80, vocab_size=50257, stable_embedding=True)
    assert law_of("wte.weight", (50257, 11600), options).bound == pytest.approx(0.0098488, abs=5e-8)


def test_stable_embedding_is_a_norm_and_xavier_weights_in_one_switch():
    stable, spelt = config(stable_embedding=True), config(embed_norm=True, init_overrides={"wte.weight": "xavier"})
    for name, shape in [("wte.weight", (100, 32)), ("wpe.weight", (16, 32)), ("blocks.0.mlp.up.weight", (128, 32))]:
        assert law_of(name, shape, stable) == law_of(name, shape, spelt)
    assert set(GPT(stable).state_dict()) == set(GPT(spelt).state_dict())
    assert law_of("wte.weight", (100, 32), config(embed_norm=True)) == Law("normal", 0.02)  # the norm alone


def test_an_override_is_taken_as_it_stands_and_the_last_that_matches_wins():
    overrides = {"blocks.*": 0.5, "blocks.1.*": "mtnlg", "*.out.weight": "small_init"}
    options = config(init_overrides=overrides)
    stds = {
        "blocks.0.mlp.down.weight": 0.5,  # not rescaled
        "blocks.1.mlp.down.weight": math.sqrt(1 / 96),
        "blocks.1.attention.out.weight": math.sqrt(2 / 160),
        "wte.weight": 0.02,
    }
    assert {name: law_of(name, (8, 8), options).value for name in stds} == pytest.approx(stds)
    assert law_of("blocks.1._orig_mod.mlp.up.weight", (8, 8), options).value == math.sqrt(1 / 96)
    assert law_of("blocks.1.mlp_norm.weight", (8,), options) == Law("constant", 1.0)  # matrices alone


@pytest.mark.parametrize(
    ("name", "fields", "value"),
    [
        ("norm.weight", {}, 1.0),
        ("norm.weight", {"norm_gain": "zero_centred"}, 0.0),
        ("norm.bias", {}, 0.0),
        ("blocks.0.attention.head_scale.weight", {}, 1.0),
        ("blocks.0.attention.qk_scale.scale", {"norm_gain": "zero_centred"}, math.log2(16 * 15)),
    ],
)
def test_constants(name, fields, value):
    assert law_of(name, (4,), config(**fields)) == Law("constant", value)


def test_sinusoids_by_hand():
    table = sinusoids(5, 6)
    for position in range(5):
        for pair in range(3):
            phase = position / 10000 ** (2 * pair / 6)
            assert table[position, 2 * pair].item() == pytest.approx(math.sin(phase), abs=1e-6)
            assert table[position, 2 * pair + 1].item() == pytest.approx(math.cos(phase), abs=1e-6)
    assert sinusoids(3, 5).shape == (3, 5)  # the last sine has no cosine
    assert table.square().mean().item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [("blocks.2.*", {}), ("head.weight", {}), ("wpe.weight", {"position": "rope"}), ("*_norm.weight", {})],
)
def test_a_pattern_that_matches_no_matrix_is_refused_with_the_names_there_are(pattern, fields):
    with torch.device("meta"), pytest.raises(ValueError, match="matches no matrix of this model, which has") as error:
        GPT(config(init_overrides={pattern: 0.1}, **fields))
    assert str(error.value).startswith(f"model.gpt.init_overrides.{pattern}: ")
    assert "blocks.*.attention.out.weight" in str(error.value)


def test_an_untied_head_has_a_law_of_its_own():
    options = config(tied=False, init_overrides={"head.weight": 0.3})
    with torch.device("meta"):
        GPT(options)
    assert law_of("head.weight", (100, 32), options).value == 0.3
    assert law_of("wte.weight", (100, 32), options).value == 0.02
