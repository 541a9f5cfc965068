"""The plan of memory: what each option adds, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_stable.model.config import GPTConfig
from lit_stable.model.formulas import parameter_count
from lit_stable.model.memory import memory_per_device
from lit_stable.model.recompute import Recompute
from lit_stable.model.sharding import build_gpt

D, LAYERS, TOKENS = 64, 3, 2 * 32


def plan(
    recompute: Recompute = False,
    compiled: bool = True,
    tensor_parallel: int = 1,
    head_makes_losses: bool = True,
    **fields,
) -> dict[str, float]:
    config = GPTConfig(vocab_size=50, n_layer=LAYERS, n_head=4, d_model=D, max_length=32, **fields)
    return memory_per_device(
        config,
        micro_batch=2,
        length=32,
        shards=2,
        width=2,
        tensor_parallel=tensor_parallel,
        recompute=recompute,
        compiled=compiled,
        head_makes_losses=head_makes_losses,
    )


def test_weights_and_states_follow_from_parameters():
    config = GPTConfig(vocab_size=50, n_layer=LAYERS, n_head=4, d_model=D, max_length=32)
    parts = plan()
    parameters = parameter_count(config)
    assert (parts["weights"], parts["optimizer states"]) == (4 * parameters / 2, 8 * parameters / 2)
    parts = memory_per_device(
        config, micro_batch=2, length=32, shards=2, width=2, stored=2, state_bytes=100, recompute=False
    )
    assert (parts["weights"], parts["optimizer states"]) == (2 * parameters / 2, 50)


BASE = LAYERS * TOKENS * D * 2 * 16  # two norms, four projections, 8 d_model inside the MLP


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({}, 0),
        ({"mlp": "swiglu", "d_ff": 256}, LAYERS * TOKENS * 256 * 2),
        ({"norm_position": "sandwich"}, LAYERS * TOKENS * D * 2 * 4),
        ({"norm_position": "normformer"}, LAYERS * TOKENS * (D * 2 * 2 + 256 * 2)),
        ({"n_kv_head": 1}, -LAYERS * TOKENS * D * 2 * 2 * 3 // 4),
        ({"qk_norm": "l2"}, LAYERS * TOKENS * D * 2 * 2),
        ({"residual_fp32": True}, LAYERS * TOKENS * D * 2 * 2),
        ({"residual_dropout": 0.1}, LAYERS * TOKENS * D * 2),
        ({"position": "alibi"}, 0),  # FlexAttention writes nothing out
        ({"attention_soft_cap": 50.0, "document_mask": True}, 0),
        ({"attention_kernel": "explicit"}, LAYERS * TOKENS * 4 * 32 * 6 + 32 * 32),
        ({"attention_soft_cap": 50.0, "attention_dropout": 0.1}, LAYERS * TOKENS * 4 * 32 * 15 + 32 * 32),
    ],
    ids=str,
)
def test_activations(fields, added):
    assert plan(**fields)["activations"] == BASE + added


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({}, LAYERS * TOKENS * D * 2 * 4),
        ({"norm_position": "normformer"}, LAYERS * TOKENS * (D * 2 * 6 + 256 * 2)),
        ({"attention_kernel": "explicit"}, LAYERS * TOKENS * D * 2 * 4 + 32 * 32),
    ],
    ids=str,
)
def test_tensor_parallel_devices_share_what_is_inside_the_sublayers(fields, whole):
    one, two = (plan(tensor_parallel=ranks, **fields)["activations"] for ranks in (1, 2))
    assert two == whole + (one - whole) / 2


def test_masks_of_a_model_that_is_not_compiled():
    wide = LAYERS * TOKENS * D * 2 * 2  # inputs of two norms in fp32
    assert plan(compiled=False, document_mask=True)["activations"] == BASE + wide + 2 * 32 * 32
    scores = LAYERS * TOKENS * 4 * 32 * 6
    assert plan(compiled=False, position="alibi")["activations"] == BASE + wide + scores + 4 * 4 * 32 * 32


def test_recomputation_keeps_the_stream_and_one_block():
    assert plan(recompute=True)["activations"] == LAYERS * TOKENS * D * 2 + BASE / LAYERS


SWIGLU = {"mlp": "swiglu", "d_ff": 256}


@pytest.mark.parametrize(("fields", "out"), [({}, 0), (SWIGLU, LAYERS * TOKENS * D * 2)], ids=str)
def test_selective_keeps_half_the_products_and_the_one_out_of_a_gated_mlp_whole(fields, out):
    kept = [
        plan(recompute="selective", tensor_parallel=ranks, **fields)["activations"]
        - plan(recompute=True, tensor_parallel=ranks, **fields)["activations"]
        for ranks in (1, 2)
    ]
    inside = LAYERS * TOKENS * 2 * (4 * D + 256)
    assert kept == [inside + out, inside / 2 + out]


def test_logits_are_there_once_and_capped_ones_beside_what_they_were():
    assert plan()["logits"] == TOKENS * 50 * 2
    assert plan(logit_soft_cap=30.0)["logits"] == TOKENS * 50 * 8


def test_an_fp32_head_keeps_16_bits_of_each_logit_where_it_makes_the_losses():
    assert plan(head_fp32=True)["logits"] == TOKENS * 50 * 2
    assert plan(head_fp32=True, logit_soft_cap=30.0)["logits"] == TOKENS * 50 * 12
    assert plan(head_fp32=True, tensor_parallel=2)["logits"] == TOKENS * 50 * 4
    assert plan(head_fp32=True, head_makes_losses=False)["logits"] == TOKENS * 50 * 4
    assert plan(head_makes_losses=False)["logits"] == TOKENS * 50 * 2


def test_copies_of_weights_are_the_ends_and_two_blocks_or_all():
    config = GPTConfig(vocab_size=50, n_layer=LAYERS, n_head=4, d_model=D, max_length=32)
    none, some, everything = (
        sharded(config, copies=kind).get("copies of weights", 0) for kind in ("none", "some", "all")
    )
    one_block = parameter_count(replace(config, n_layer=LAYERS + 1)) - parameter_count(config)
    assert none == 0
    assert everything == 2 * parameter_count(config)
    assert everything - some == 2 * one_block  # of three


def test_uncompiled_blocks_keep_what_is_planned():
    """Against the bytes that autograd keeps of one block more, its weights rounded by autocast apart."""
    config = GPTConfig(vocab_size=64, n_layer=2, n_head=4, d_model=256, max_length=64)
    more = [replace(config, n_layer=layers) for layers in (2, 3)]
    two, three = (kept_bytes(c, batch=16) for c in more)
    planned = [
        memory_per_device(
            c, micro_batch=16, length=64, shards=1, width=2, recompute=False, compiled=False, copies="all"
        )
        for c in more
    ]
    expected = sum(planned[1][part] - planned[0][part] for part in ("activations", "copies of weights"))
    assert three - two == pytest.approx(expected, rel=0.02)  # statistics of norms and of attention are not planned


def kept_bytes(config: GPTConfig, batch: int) -> int:
    gpt = build_gpt(config, seed=0, device=torch.device("cpu"))
    own = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    kept: dict[int, Tensor] = {}  # by storage; held, so that no other takes its address

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        gpt(torch.zeros(batch, config.max_length, dtype=torch.long))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_gradients_of_a_single_micro_batch_take_the_place_of_activations():
    config = GPTConfig(vocab_size=50, n_layer=LAYERS, n_head=4, d_model=D, max_length=32)
    several, single = sharded(config), sharded(config, accumulates=False)
    assert several["gradients"] == 4 * parameter_count(config) / 2
    assert single["gradients"] == max(0, several["gradients"] - several["activations"] - several["logits"])
    large = sharded(config, accumulates=False, gradient_bytes=1e9)
    assert large["gradients"] + large["activations"] + large["logits"] == 1e9 / 2


def sharded(config: GPTConfig, **options: Any) -> dict[str, float]:
    return memory_per_device(config, micro_batch=2, length=32, shards=2, width=2, recompute=False, **options)
