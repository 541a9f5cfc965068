"""The configuration: resolved numbers, refusals, and its use by the command line."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import math

import jsonargparse
import pytest

from lit_stable.model.attention_options import AttentionOptions
from lit_stable.model.config import GPTConfig
from lit_stable.model.embedding_options import EmbeddingOptions
from lit_stable.model.init_options import InitOptions


@pytest.mark.parametrize(
    ("mlp", "d_model", "d_ff", "hidden"),
    [
        ("gelu", 768, None, 3072),
        ("relu", 768, None, 3072),
        ("swiglu", 768, None, 2048),
        ("swiglu", 512, None, 1408),
        ("swiglu", 512, 100, 100),
    ],
)
def test_mlp_width_resolves(mlp, d_model, d_ff, hidden):
    assert GPTConfig(n_head=8, d_model=d_model, mlp=mlp, d_ff=d_ff).hidden == hidden


@pytest.mark.parametrize(
    ("law", "width", "golden"),
    [
        ("small_init", 11600, 0.0058722),
        ("mtnlg", 11600, 0.0053606),
        ("mtnlg", 14336, 0.0048220),
        ("mtnlg", 20480, 0.0040344),
        ("mtnlg", 7680, 0.006588),
    ],
)
def test_named_stds_are_the_golden_values_of_large_runs(law, width, golden):
    assert GPTConfig(d_model=width, n_head=8, init_std=law).std == pytest.approx(golden, rel=2e-5)


def test_every_problem_is_reported_at_once():
    with pytest.raises(ValueError, match="must be") as error:
        GPTConfig(
            vocab_size=0,
            n_head=12,
            d_model=770,
            norm="batchnorm",
            dropout=1.0,
            norm_eps=math.nan,
            init_std=-1.0,
            n_kv_head=5,
            embed_scale=0.0,
        )
    assert str(error.value).splitlines() == [
        "model.gpt.norm='batchnorm': must be one of layernorm, rmsnorm.",
        "model.gpt.vocab_size=0: must be at least 1.",
        "model.gpt.d_model=770: must be a multiple of n_head=12; nearest legal: 768 and 780.",
        "model.gpt.norm_eps=nan: must be a finite number above 0.",
        "model.gpt.dropout=1.0: must be at least 0 and below 1.",
        "model.gpt.n_kv_head=5: must divide n_head=12; legal are 1, 2, 3, 4, 6, 12.",
        "model.gpt.embed_scale=0.0: must be a finite number above 0 or sqrt_d.",
        "model.gpt.init_std=-1.0: must be a finite number above 0 or one of small_init, mtnlg.",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_head": 0}, "model.gpt.n_head=0: must be at least 1."),
        ({"d_ff": 0}, "model.gpt.d_ff=0: must be at least 1."),
        ({"d_model": 4, "n_head": 8}, r"multiple of n_head=8; nearest legal: 8\."),
        ({"d_model": 12, "n_head": 4, "position": "rope"}, r"model.gpt.n_head=4: heads of d_model=12 have odd size 3"),
        ({"rope_theta": math.inf}, "model.gpt.rope_theta=inf: must be a finite number above 0."),
        ({"init_std": "xavier"}, "init_std='xavier': must be a finite number above 0 or one of small_init, mtnlg."),
        ({"qk_norm": "cosine"}, "model.gpt.qk_norm='cosine': must be one of none, layernorm, rmsnorm, l2."),
        ({"norm_position": "post"}, "norm_position='post': must be one of pre, post_sublayer, sandwich, normformer."),
        ({"norm_gain": "two"}, "model.gpt.norm_gain='two': must be one of one, zero_centred."),
        ({"mlp": "silu"}, "model.gpt.mlp='silu': must be one of gelu, gelu_tanh, relu, swiglu."),
        ({"position": "none"}, "model.gpt.position='none': must be one of learned, rope, alibi."),
        ({"attention_scale": "pre"}, "model.gpt.attention_scale='pre': must be one of post, pre_sqrt."),
        ({"qk_layer_scaling": "hf"}, "qk_layer_scaling='hf': must be one of none, megatron, hf_inverse_layer."),
        ({"attention_kernel": "flash"}, "attention_kernel='flash': must be one of auto, explicit."),
        ({"n_kv_head": 0}, "model.gpt.n_kv_head=0: must divide n_head=12"),
        ({"attention_soft_cap": 0.0}, "attention_soft_cap=0.0: must be a finite number above 0, or null."),
        ({"logit_soft_cap": math.inf}, "model.gpt.logit_soft_cap=inf: must be a finite number above 0."),
        ({"qk_l2_scale": "fixed"}, "qk_l2_scale='fixed': must be a finite number above 0 or learned."),
        ({"qk_l2_scale": -1.0}, "qk_l2_scale=-1.0: must be a finite number above 0 or learned."),
        ({"qk_norm": "l2", "attention_scale": "pre_sqrt"}, "attention_scale=pre_sqrt: places .* which qk_norm=l2"),
        ({"qk_norm": "l2", "max_length": 2}, r"qk_l2_scale=learned: starts at log2\(L\^2 - L\)"),
        ({"reset_positions": True}, "reset_positions=True: counts within documents; set document_mask: true as well."),
        (
            {"reset_positions": True, "document_mask": True, "position": "alibi"},
            "reset_positions=True: position=alibi sees distances only",
        ),
        ({"document_separator": 50304}, "document_separator=50304: must be a token id below vocab_size=50304."),
        ({"embed_scale": "sqrt"}, "embed_scale='sqrt': must be a finite number above 0 or sqrt_d."),
        ({"embed_scale": "sqrt_d", "embed_norm": True}, "embed_scale=sqrt_d: the norm after the embedding takes"),
        ({"embed_scale": 2.0, "stable_embedding": True}, "embed_scale=2.0: the norm after the embedding takes"),
        ({"stable_embedding": True, "norm": "rmsnorm"}, "stable_embedding=True: is a layer norm, and norm=rmsnorm"),
        ({"embed_grad_shrink": 1.5}, r"embed_grad_shrink=1.5: must be a share in \[0, 1\]"),
        ({"embed_grad_shrink": []}, r"embed_grad_shrink=\[\]: must be a share in \[0, 1\]"),
        ({"embed_grad_shrink": [(5, 0.1), (5, 1.0)]}, "points with rising steps from 0 on."),
        ({"embed_dropout": 1.0}, "model.gpt.embed_dropout=1.0: must be at least 0 and below 1."),
        ({"attention_dropout": -0.1}, "model.gpt.attention_dropout=-0.1: must be at least 0 and below 1."),
        ({"residual_dropout": math.nan}, "model.gpt.residual_dropout=nan: must be at least 0 and below 1."),
        (
            {"init_overrides": {"wte.weight": "he"}},
            "init_overrides.wte.weight='he': must be a finite number above 0 or",
        ),
        ({"init_overrides": {"*": 0.0}}, r"init_overrides.\*=0.0: must be a finite number above 0 or one of"),
        ({"init_overrides": {"wte.weight": "sinusoidal"}}, "wte.weight=sinusoidal: is a table of positions; only wpe"),
    ],
)
def test_refusal_names_value_and_rule(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        GPTConfig(**fields)
    assert len(str(error.value).splitlines()) == 1


def test_text_is_the_shape_and_what_is_not_at_its_default():
    shape = "vocab_size=50304, n_layer=2, n_head=12, d_model=768, max_length=1024"
    assert repr(GPTConfig(n_layer=2)) == f"GPTConfig({shape})"
    changed = GPTConfig(n_layer=2, mlp="relu", init_overrides={"wte.weight": 0.1}, n_kv_head=4)
    assert repr(changed) == f"GPTConfig({shape}, init_overrides={{'wte.weight': 0.1}}, n_kv_head=4, mlp='relu')"
    assert eval(repr(changed)) == changed


def test_dropout_is_one_rate_or_three():
    config = GPTConfig(dropout=0.1, attention_dropout=0.0, residual_dropout=0.2)
    assert [config.dropout_of(place) for place in ("embed", "attention", "residual")] == [0.1, 0.0, 0.2]


def test_shrink_follows_its_points():
    config = GPTConfig(embed_grad_shrink=[(6000, 0.1), (6500, 1.0), (33700, 0.5)])  # GLM-130B, and a later drop
    shares = [config.embed_gradient(step) for step in (0, 6000, 6250, 6500, 20100, 33700, 10**6)]
    assert shares == pytest.approx([0.1, 0.1, 0.55, 1.0, 0.75, 0.5, 0.5])
    assert (GPTConfig().embed_gradient(5), GPTConfig(embed_grad_shrink=0.3).embed_gradient(5)) == (1.0, 0.3)


def test_odd_heads_are_legal_without_rotation():
    assert GPTConfig(d_model=12, n_head=4).head_size == 3


def test_command_line_sets_every_kind_of_field():
    arguments = ["d_model=64", "n_head=4", "init_std=small_init", "d_ff=96", "mlp=swiglu", "tied=false"]
    arguments += ["n_kv_head=2", "embed_grad_shrink=[[6000, 0.1], [6500, 1.0]]", "attention_soft_cap=50"]
    arguments += ["init_overrides={wpe.weight: sinusoidal, blocks.*.mlp.up.*: 0.01}"]
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GPTConfig, "model")
    config = GPTConfig(**parser.parse_args([f"--model.{argument}" for argument in arguments]).model.as_dict())
    assert config == GPTConfig(
        d_model=64,
        n_head=4,
        init_std="small_init",
        d_ff=96,
        mlp="swiglu",
        tied=False,
        n_kv_head=2,
        embed_grad_shrink=[(6000, 0.1), (6500, 1.0)],
        attention_soft_cap=50.0,
        init_overrides={"wpe.weight": "sinusoidal", "blocks.*.mlp.up.*": 0.01},
    )


@pytest.mark.parametrize("argument", ["n_layer=x", "norm=x", "n_kv_head=x", "qk_norm=x", "position=x", "init_std=x"])
def test_command_line_refuses_a_value_of_the_wrong_type(argument):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GPTConfig, "model")
    with pytest.raises(argparse.ArgumentError, match=argument.partition("=")[0]):
        parser.parse_args([f"--model.{argument}"])


def test_every_field_is_documented_for_help():
    documented = []
    for options in (InitOptions, EmbeddingOptions, AttentionOptions, GPTConfig):
        body = ast.parse(inspect.getsource(options)).body[0].body
        documented += [
            field.target.id
            for field, text in itertools.pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        ]
    assert documented == [field.name for field in dataclasses.fields(GPTConfig)]
