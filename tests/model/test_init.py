"""Initial weights: laws, independence of order, and the audit that reads them back."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import audit_init, format_audit, init_module, initialise

TINY = GPTConfig(
    vocab_size=257, n_layer=3, n_head=4, d_model=64, max_length=16, bias=True, embed_norm=True, qk_norm="layernorm"
)


def build(config: GPTConfig = TINY, seed: int = 1) -> GPT:
    gpt = GPT(config)
    initialise(gpt, seed)
    return gpt


def assert_same(gpt: GPT, other: GPT) -> None:
    assert gpt.state_dict().keys() == other.state_dict().keys()
    for name, tensor in gpt.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_laws_of_every_kind_of_parameter():
    gpt = build(dataclasses.replace(TINY, d_model=128, init_std="small_init", tied=False))
    std = math.sqrt(2 / (5 * 128))
    block = gpt.blocks[1]
    for module in (gpt.wte, gpt.head, block.attention.qkv, block.mlp.up):
        assert module.weight.std().item() == pytest.approx(std, rel=0.02)
    for module in (block.attention.out, block.mlp.down):
        assert module.weight.std().item() == pytest.approx(std / math.sqrt(2 * 3), rel=0.02)
    for norm in (gpt.embed_norm, gpt.norm, block.attention_norm, block.attention.q_norm):
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
    assert not any(param.any() for name, param in gpt.named_parameters() if name.endswith("bias"))


def test_a_std_of_opts_has_the_tails_of_a_normal_law():
    weight = build(dataclasses.replace(TINY, vocab_size=4000, init_std=0.006, n_layer=1)).wte.weight
    assert torch.quantile(weight.flatten(), 0.99).item() == pytest.approx(0.01396, rel=0.01)


def test_rescale_off_leaves_residual_outputs_at_the_common_std():
    gpt = build(dataclasses.replace(TINY, residual_rescale=False))
    assert gpt.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02, rel=0.03)


def test_parameters_of_one_shape_differ_by_name_and_by_seed():
    gpt = build()
    assert not torch.equal(gpt.blocks[0].mlp.up.weight, gpt.blocks[1].mlp.up.weight)
    assert not torch.equal(gpt.wte.weight, build(seed=2).wte.weight)
    assert_same(gpt, build())


def test_global_random_state_is_neither_read_nor_moved():
    gpt = GPT(TINY)
    state = torch.get_rng_state()
    initialise(gpt, 1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("tied", [True, False])
def test_order_of_filling_does_not_matter(tied):
    config = dataclasses.replace(TINY, tied=tied)
    gpt = GPT(config)
    for name, module in reversed(list(gpt.named_children())):
        if name != "blocks":
            init_module(module, f"{name}.", config, 1)
    for index in (2, 0, 1):
        init_module(gpt.blocks[index], f"blocks.{index}.", config, 1)
    assert_same(gpt, build(config))


def test_meta_build_is_filled_and_tied_again():
    with torch.device("meta"):
        gpt = GPT(TINY)
    gpt.to_empty(device="cpu")
    initialise(gpt, 1)
    assert gpt.head.weight is gpt.wte.weight
    assert_same(gpt, build())


def test_wrappers_in_names_change_nothing():
    gpt = GPT(TINY)
    gpt.blocks[1] = checkpoint_wrapper(gpt.blocks[1])
    gpt.blocks[2] = torch.compile(gpt.blocks[2])
    initialise(gpt, 1)
    for (_, param), (name, expected) in zip(gpt.named_parameters(), build().named_parameters(), strict=True):
        assert torch.equal(param, expected), name


def test_bf16_parameters_hold_the_rounded_fp32_draw():
    gpt = GPT(TINY).bfloat16()
    initialise(gpt, 1)
    assert torch.equal(gpt.wte.weight, build().wte.weight.bfloat16())


def test_audit_passes_what_initialise_made():
    for fields in (
        {},
        {"init_std": "small_init", "mlp": "swiglu", "tied": False},
        {"residual_rescale": False},
        {"init_std": "mtnlg", "norm_gain": "zero_centred", "norm_position": "normformer", "qk_norm": "l2"},
        {"stable_embedding": True, "init_overrides": {"wpe.weight": "sinusoidal", "blocks.0.*": 0.1}},
    ):
        config = dataclasses.replace(TINY, **fields)
        gpt = build(config)
        rows = audit_init(gpt.named_parameters(), config)
        assert [row.name for row in rows] == [name for name, _ in gpt.named_parameters()]
        assert all(row.ok for row in rows)
        assert "OFF" not in format_audit(rows)


def test_audit_names_an_embedding_overwritten_after_construction():
    gpt = build()
    nn.init.xavier_uniform_(gpt.wpe.weight)
    rows = audit_init(gpt.named_parameters(), TINY)
    assert [(row.name, row.shape, row.declared) for row in rows if not row.ok] == [("wpe.weight", (16, 64), 0.02)]
    assert format_audit(rows).splitlines()[-1].startswith("OFF wpe.weight (16, 64): measured 0.1")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("blocks.1.mlp.down.weight", lambda w: w.mul_(1.1)),
        ("blocks.1.mlp.up.weight", lambda w: w.add_(0.01)),  # a shifted mean, at the right spread
        ("blocks.2.attention.q_norm.weight", lambda w: w[3].fill_(0.999)),
        ("norm.bias", lambda b: b[0].fill_(1e-8)),
        ("blocks.0.attention.qkv.weight", lambda w: w.fill_(math.nan)),
        ("norm.weight", lambda w: w.fill_(math.nan)),
    ],
)
def test_audit_finds_one_wrong_parameter(name, damage):
    gpt = build()
    damage(gpt.get_parameter(name).data)
    rows = audit_init(gpt.named_parameters(), TINY)
    assert [row.name for row in rows if not row.ok] == [name]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("wte.weight", lambda w: w.normal_(0, math.sqrt(2 / (257 + 64)))),  # the right spread by the wrong law
        ("wpe.weight", lambda w: w[3, 5].add_(1e-6)),
        ("blocks.0.attention.qk_scale.scale", lambda s: s.add_(1e-5)),
    ],
)
def test_audit_finds_one_wrong_parameter_of_the_other_laws(name, damage):
    config = dataclasses.replace(TINY, stable_embedding=True, qk_norm="l2", init_overrides={"wpe.weight": "sinusoidal"})
    gpt = build(config)
    assert all(row.ok for row in audit_init(gpt.named_parameters(), config))
    damage(gpt.get_parameter(name).data)
    assert [row.name for row in audit_init(gpt.named_parameters(), config) if not row.ok] == [name]


def test_xavier_fills_its_bounds_evenly():
    weight = build(dataclasses.replace(TINY, stable_embedding=True)).wte.weight
    bound = math.sqrt(6 / (257 + 64))
    assert 0.99 * bound < weight.abs().max() <= bound
    shares = torch.histc(weight.detach(), bins=4, min=-bound, max=bound) / weight.numel()
    torch.testing.assert_close(shares, torch.full((4,), 0.25), atol=0.02, rtol=0)


def test_an_override_changes_its_matrices_and_no_others():
    plain, changed = build(), build(dataclasses.replace(TINY, init_overrides={"blocks.1.mlp.*": 0.1}))
    moved = {name for name, p in changed.named_parameters() if not torch.equal(p, plain.get_parameter(name))}
    assert moved == {"blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight"}
    assert changed.blocks[1].mlp.down.weight.std().item() == pytest.approx(0.1, rel=0.03)


def test_audit_table_takes_blocks_together():
    table = format_audit(audit_init(build().named_parameters(), TINY)).splitlines()
    line = next(line.split() for line in table if line.startswith("blocks.*.attention.out.weight"))
    assert line[1:4] == ["3", "normal", "0.00816497"]
    assert line[-1] == "0"
