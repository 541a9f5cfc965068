"""Which options may differ between a checkpoint and the run that goes on from it."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from any_gpt import any_options
from hypothesis import Phase, given, settings

from lit_stable.model.config import GPTConfig
from lit_stable.model.same_model import model_changes, model_record

TINY = GPTConfig(vocab_size=50, n_layer=1, n_head=4, d_model=32, max_length=12)


def changes(old: dict[str, object], new: dict[str, object]) -> tuple[list[str], list[str]]:
    return model_changes(dataclasses.replace(TINY, **new), model_record(dataclasses.replace(TINY, **old)))


@settings(max_examples=50, derandomize=True, deadline=None, phases=[Phase.generate])
@given(options=any_options())
def test_a_model_is_itself_after_a_round_trip_through_a_checkpoint(options):
    config = GPTConfig(**options)
    file = io.BytesIO()
    torch.save(model_record(config), file)
    file.seek(0)
    assert model_changes(config, torch.load(file, weights_only=True)) == ([], [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"n_head": 2}),
        ({}, {"position": "alibi"}),
        ({"position": "rope"}, {"position": "alibi"}),
        ({}, {"norm_gain": "zero_centred"}),
        ({}, {"mlp": "relu"}),
        ({}, {"qk_layer_scaling": "hf_inverse_layer"}),
        ({}, {"stable_embedding": True}),
        ({}, {"embed_scale": "sqrt_d"}),
        ({"norm": "rmsnorm"}, {"norm": "layernorm"}),
        ({"qk_norm": "l2", "qk_l2_scale": 8.0}, {"qk_norm": "l2", "qk_l2_scale": 9.0}),
    ],
    ids=str,
)
def test_what_gives_weights_another_meaning_is_refused(old, new):
    problems, _ = changes(old, new)
    assert len(problems) == 1
    assert "the checkpoint is of a model with" in problems[0]


def test_the_sentence_names_both_values():
    assert changes({}, {"n_head": 2})[0] == [
        "model.gpt.n_head=2: the checkpoint is of a model with 4, and its weights would mean something else here; set"
        " it back, or begin a new run.",
    ]


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({}, {"head_fp32": True}, ["gpt.head_fp32 False -> True (recipe)"]),
        ({}, {"attention_scale": "pre_sqrt"}, ["gpt.attention_scale post -> pre_sqrt (recipe)"]),
        ({"dropout": 0.1}, {}, ["gpt.dropout 0.1 -> 0.0 (recipe)"]),
        ({}, {"attention_soft_cap": 50.0}, ["gpt.attention_soft_cap None -> 50.0 (recipe)"]),
        ({}, {"d_ff": 128, "n_kv_head": 4}, []),  # what the defaults come to
        ({}, {"qk_layer_scaling": "megatron"}, []),
        ({}, {"d_model": 64, "n_layer": 2}, []),  # seen in shapes
        ({"embed_norm": True}, {"stable_embedding": True}, ["gpt.stable_embedding False -> True (recipe)"]),
    ],
    ids=str,
)
def test_what_may_change_is_said(old, new, lines):
    assert changes(old, new) == ([], lines)


def test_another_activation_is_a_swap_on_purpose():
    relu = dataclasses.replace(TINY, mlp="relu")
    (refused,), _ = model_changes(relu, model_record(TINY))
    assert "set it back, swap it by surgery: {swap: [activation]}, or begin" in refused
    assert model_changes(relu, model_record(TINY), ["activation"]) == ([], ["gpt.mlp gelu -> relu (recipe)"])
    swiglu = dataclasses.replace(TINY, mlp="swiglu")
    assert "surgery" not in model_changes(swiglu, model_record(TINY))[0][0]


def test_an_option_that_the_record_does_not_know_was_at_its_default():
    record = model_record(TINY)
    del record["mlp"]
    assert model_changes(TINY, record) == ([], [])
    assert len(model_changes(dataclasses.replace(TINY, mlp="relu"), record)[0]) == 1
