"""The configuration: resolved numbers, refusals, and its use by the command line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math

import jsonargparse
import pytest

from lit_stable.model.config import GPTConfig


@pytest.mark.parametrize(
    ("mlp", "d_model", "d_ff", "hidden"),
    [("gelu", 768, None, 3072), ("swiglu", 768, None, 2048), ("swiglu", 512, None, 1408), ("swiglu", 512, 100, 100)],
)
def test_mlp_width_resolves(mlp, d_model, d_ff, hidden):
    assert GPTConfig(n_head=8, d_model=d_model, mlp=mlp, d_ff=d_ff).hidden == hidden


def test_small_init_is_the_golden_value_of_the_104b_run():
    assert GPTConfig(d_model=11600, n_head=80, init_std="small_init").std == pytest.approx(0.0058722, abs=5e-8)


def test_every_problem_is_reported_at_once():
    with pytest.raises(ValueError, match="must be") as error:
        GPTConfig(vocab_size=0, n_head=12, d_model=770, norm="batchnorm", dropout=1.0, norm_eps=math.nan, init_std=-1.0)
    assert str(error.value).splitlines() == [
        "model.gpt.norm='batchnorm': must be one of layernorm, rmsnorm.",
        "model.gpt.vocab_size=0: must be at least 1.",
        "model.gpt.d_model=770: must be a multiple of n_head=12; nearest legal: 768 and 780.",
        "model.gpt.norm_eps=nan: must be a finite number above 0.",
        "model.gpt.init_std=-1.0: must be a finite number above 0 or small_init.",
        "model.gpt.dropout=1.0: must be at least 0 and below 1.",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_head": 0}, "model.gpt.n_head=0: must be at least 1."),
        ({"d_ff": 0}, "model.gpt.d_ff=0: must be at least 1."),
        ({"d_model": 4, "n_head": 8}, r"multiple of n_head=8; nearest legal: 8\."),
        ({"d_model": 12, "n_head": 4, "position": "rope"}, r"model.gpt.n_head=4: heads of d_model=12 have odd size 3"),
        ({"rope_theta": math.inf}, "model.gpt.rope_theta=inf: must be a finite number above 0."),
        ({"init_std": "xavier"}, "model.gpt.init_std='xavier': must be a finite number above 0 or small_init."),
        ({"qk_norm": "l2"}, "model.gpt.qk_norm='l2': must be one of none, layernorm, rmsnorm."),
    ],
)
def test_refusal_names_value_and_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)


def test_odd_heads_are_legal_without_rotation():
    assert GPTConfig(d_model=12, n_head=4).head_size == 3


def test_command_line_sets_every_kind_of_field():
    arguments = ["d_model=64", "n_head=4", "init_std=small_init", "d_ff=96", "mlp=swiglu", "tied=false"]
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GPTConfig, "model")
    config = GPTConfig(**parser.parse_args([f"--model.{argument}" for argument in arguments]).model.as_dict())
    assert config == GPTConfig(d_model=64, n_head=4, init_std="small_init", d_ff=96, mlp="swiglu", tied=False)


def test_every_field_is_documented_for_help():
    body = ast.parse(inspect.getsource(GPTConfig)).body[0].body
    documented = [
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    ]
    assert documented == [field.name for field in dataclasses.fields(GPTConfig)]
