"""The whole model: structure, causality, dtypes, dropout, head, and what each option changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise
from lit_stable.model.norm import is_norm

TINY = GPTConfig(vocab_size=50, n_layer=2, n_head=4, d_model=32, max_length=12)


def build(**fields) -> GPT:
    gpt = GPT(dataclasses.replace(TINY, **fields))
    initialise(gpt, seed=1)
    return gpt


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def names(gpt: GPT) -> set[str]:
    return {name.replace("blocks.1.", "blocks.0.") for name in gpt.state_dict()}


@pytest.mark.parametrize(
    ("fields", "added", "removed"),
    [
        ({"embed_norm": True}, {"embed_norm.weight"}, set()),
        ({"embed_norm": True, "norm": "rmsnorm"}, {"embed_norm.weight"}, set()),
        ({"position": "rope"}, set(), {"wpe.weight"}),
        ({"mlp": "swiglu"}, {"blocks.0.mlp.gate.weight"}, set()),
        ({"qk_norm": "layernorm"}, {"blocks.0.attention.q_norm.weight", "blocks.0.attention.k_norm.weight"}, set()),
        (
            {"bias": True},
            {f"blocks.0.{part}.bias" for part in ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]}
            | {"norm.bias", "blocks.0.attention_norm.bias", "blocks.0.mlp_norm.bias"},
            set(),
        ),
    ],
)
def test_option_changes_the_state_dict_and_old_weights_are_refused(fields, added, removed):
    plain, changed = build(), build(**fields)
    assert names(changed) - names(plain) == added
    assert names(plain) - names(changed) == removed
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        changed.load_state_dict(plain.state_dict())


def test_tied_head_is_one_storage_and_untied_is_not():
    tied, untied = build(), build(tied=False)
    assert tied.head.weight is tied.wte.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    assert not torch.equal(untied.head.weight, untied.wte.weight)


@pytest.mark.parametrize("fields", [{}, {"position": "rope", "mlp": "swiglu", "norm": "rmsnorm", "qk_norm": "rmsnorm"}])
def test_a_later_token_never_changes_an_earlier_logit(fields):
    gpt, tokens = build(**fields), ids(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 50
    with torch.no_grad():
        before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_forward_is_trunk_then_head():
    gpt = build()
    hidden = gpt.trunk(ids(2, 5))
    assert hidden.shape == (2, 5, 32)
    assert torch.equal(gpt.head_logits(hidden), gpt(ids(2, 5)))
    torch.testing.assert_close(gpt(ids(2, 5)), hidden @ gpt.wte.weight.T)


def test_order_of_tokens_matters_only_through_positions():
    # One block sees its past as a set: without position information the last logit ignores its order.
    swapped = ids(1, 6)[:, [1, 0, 2, 3, 4, 5]]
    learned, rope = build(n_layer=1), build(n_layer=1, position="rope", init_std=0.5)
    for gpt in (learned, rope):
        assert (gpt(ids(1, 6))[0, -1] - gpt(swapped)[0, -1]).abs().max() > 1e-5
    learned.wpe.weight.data.zero_()
    torch.testing.assert_close(learned(ids(1, 6))[0, -1], learned(swapped)[0, -1])


def test_longer_sequence_than_max_length_is_refused():
    with pytest.raises(ValueError, match=r"13 tokens: model\.gpt\.max_length=12 is the longest"):
        build()(ids(1, 13))


def test_embedding_norm_gives_the_first_block_rms_one():
    gpt = build(embed_norm=True, position="rope")
    rms = gpt.embed(ids(2, 12)).square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), atol=0.02, rtol=0)  # eps against a variance of 0.02^2
    assert build(position="rope").embed(ids(2, 12)).square().mean().sqrt() < 0.03


def test_embedding_norm_comes_before_positions():
    gpt = build(embed_norm=True)
    gpt.wpe.weight.data.fill_(5.0)
    assert gpt.embed(ids(1, 12)).mean().item() == pytest.approx(5.0, abs=1e-4)


def test_residual_stream_and_logits_have_the_autocast_dtype():
    gpt, seen = build(position="rope", qk_norm="layernorm"), []
    for block in gpt.blocks:
        block.register_forward_hook(lambda _, args, y: seen.append((y.dtype, args[1].cos.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        assert gpt(ids(1, 4)).dtype == torch.bfloat16
    assert seen == [(torch.bfloat16, torch.float32)] * 2
    assert gpt(ids(1, 4)).dtype == torch.float32
    assert gpt.bfloat16()(ids(1, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_fp32_head_sees_a_weight_of_one_plus_two_to_minus_ten(tied):
    # 1 + 2^-10 is 1 in bf16, so a head in disguise gives exactly D.
    def logit(**fields) -> torch.Tensor:
        gpt = build(tied=tied, **fields)
        gpt.head.weight.data.fill_(1 + 2**-10)
        with torch.autocast("cpu", torch.bfloat16):
            return gpt.head_logits(torch.ones(1, 1, 32, dtype=torch.bfloat16))[0, 0, 0]

    assert logit(head_fp32=True).dtype == torch.float32
    assert logit(head_fp32=True).item() == 32 * (1 + 2**-10)
    assert logit(head_fp32=False).item() == 32.0


def test_fp32_head_multiplies_bf16_weights_in_fp32():
    gpt = build(head_fp32=True, tied=False).bfloat16()
    hidden = torch.randn(1, 3, 32).bfloat16()
    torch.testing.assert_close(gpt.head_logits(hidden), hidden.float() @ gpt.head.weight.float().T)


def test_dropout_acts_in_training_only():
    gpt = build(dropout=0.5)
    torch.manual_seed(0)
    assert not torch.equal(gpt(ids(1, 8)), gpt(ids(1, 8)))
    assert torch.equal(gpt.eval()(ids(1, 8)), gpt(ids(1, 8)))
    assert torch.equal(gpt(ids(1, 8)), build()(ids(1, 8)))


@pytest.mark.parametrize("place", ["dropout", "blocks.0.dropout", "blocks.0.attention.dropout"])
def test_every_place_of_dropout_drops_and_follows_its_module(place):
    gpt = build()
    assert sum(isinstance(module, nn.Dropout) for module in gpt.modules()) == 1 + 2 * TINY.n_layer
    assert torch.equal(gpt(ids(1, 8)), gpt(ids(1, 8)))
    gpt.get_submodule(place).p = 0.5
    assert not torch.equal(gpt(ids(1, 8)), gpt(ids(1, 8)))


def test_sharding_wrapper_in_bf16_leaves_norms_phases_and_fp32_head_alone():
    gpt, seen = build(position="rope", norm="rmsnorm", qk_norm="layernorm", head_fp32=True), []
    gpt.head.weight.data.fill_(1 + 2**-10)
    for block in gpt.blocks:
        block.register_forward_hook(lambda block, args, y: seen.append((y.dtype, args[1].cos.dtype)))
        block.attention.qkv.register_forward_pre_hook(lambda qkv, args: seen.append((args[0].dtype, qkv.weight.dtype)))
    gpt.norm.register_forward_hook(lambda norm, args, y: seen.append((y.dtype, norm.weight.dtype)))
    bf16, fp32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16), MixedPrecisionPolicy(cast_forward_inputs=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for norm in filter(is_norm, gpt.modules()):
            fully_shard(norm, mesh=mesh, mp_policy=fp32)
        fully_shard([gpt.wte, gpt.head], mesh=mesh, mp_policy=fp32)
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh, mp_policy=bf16)
        fully_shard(gpt, mesh=mesh, mp_policy=bf16)
        hidden = []
        gpt.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        logits = gpt(ids(1, 6))
    finally:
        dist.destroy_process_group()
    assert seen == 2 * [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)] + [
        (torch.bfloat16, torch.float32)
    ]
    expected = hidden[0].double().sum(-1) * (1 + 2**-10)
    torch.testing.assert_close(logits[..., 0].double(), expected, atol=1e-5, rtol=1e-5)


def test_block_compiles_as_one_graph_and_once_for_all_blocks():
    gpt = build(position="rope", qk_norm="rmsnorm", mlp="swiglu")
    expected = gpt(ids(2, 12))
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in gpt.blocks:
        block.compile(backend=count, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(gpt(ids(2, 12)), expected)
    assert len(graphs) == 1


def test_under_autocast_the_first_block_needs_no_graph_of_its_own_though_it_is_handed_fp32():
    gpt = build(position="rope")
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in gpt.blocks:
        block.residual = torch.compile(block.residual, backend=count, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        gpt(ids(2, 12))
    assert len(graphs) == 1
