"""The whole model: structure, causality, dtypes, dropout, head, and what each option changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from tiny_fit import Watch
from tiny_gpt_run import fit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise
from lit_stable.model.norm import is_norm_or_gain

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
        ({"stable_embedding": True}, {"embed_norm.weight"}, set()),
        ({"position": "alibi"}, set(), {"wpe.weight"}),
        ({"qk_norm": "l2"}, {"blocks.0.attention.qk_scale.scale"}, set()),
        (
            {"norm_position": "post_sublayer"},
            {"blocks.0.attention_output_norm.weight", "blocks.0.mlp_output_norm.weight"},
            {"blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight"},
        ),
        (
            {"norm_position": "sandwich"},
            {"blocks.0.attention_output_norm.weight", "blocks.0.mlp_output_norm.weight"},
            set(),
        ),
        (
            {"norm_position": "normformer"},
            {f"blocks.0.{part}.weight" for part in ["attention_output_norm", "attention.head_scale", "mlp.inner_norm"]},
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


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"position": "rope", "mlp": "swiglu", "norm": "rmsnorm", "qk_norm": "rmsnorm"},
        {"position": "alibi", "norm_position": "normformer", "n_kv_head": 2, "mlp": "relu"},
        {"attention_soft_cap": 5.0, "norm_position": "sandwich", "qk_norm": "l2", "qk_layer_scaling": "megatron"},
        {"norm_position": "post_sublayer", "attention_scale": "pre_sqrt", "qk_layer_scaling": "hf_inverse_layer"},
    ],
)
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
    assert torch.equal(gpt.head(hidden), gpt(ids(2, 5)))
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


def test_a_stable_embedding_tied_to_the_head_computes_in_bf16_and_is_one_tensor():
    """bitsandbytes' module cannot: its norm meets weights of another dtype."""
    gpt = build(stable_embedding=True)
    tokens, wide = ids(1, 8), gpt(ids(1, 8))
    assert [name for name, p in gpt.named_parameters() if p.shape == (TINY.vocab_size, 32)] == ["wte.weight"]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(gpt(tokens).float(), wide, rtol=0, atol=0.02)
    narrow = gpt.bfloat16()(tokens)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0, atol=0.05)


@pytest.mark.parametrize(("scale", "factor"), [("sqrt_d", 32**0.5), (12.0, 12.0)])
def test_embedding_scale_multiplies_tokens_and_not_positions(scale, factor):
    plain, scaled = build(), build(embed_scale=scale)
    positions = plain.wpe(torch.arange(12))
    torch.testing.assert_close(scaled.embed(ids(2, 12)) - positions, factor * (plain.embed(ids(2, 12)) - positions))


def test_shrunk_embedding_has_the_same_logits_and_the_share_of_its_gradient():
    gradients = {}
    for share in (1.0, 0.1):
        gpt = build(tied=False, embed_grad_shrink=0.5)
        gpt.embed_gradient = torch.tensor(share)
        logits = gpt(ids(2, 12))
        assert torch.equal(logits, build(tied=False)(ids(2, 12)))
        logits.square().sum().backward()
        gradients[share] = {name: parameter.grad for name, parameter in gpt.named_parameters()}
    shrunk, whole = gradients[0.1].pop("wte.weight"), gradients[1.0].pop("wte.weight")
    torch.testing.assert_close(shrunk, 0.1 * whole, rtol=1e-5, atol=1e-7)  # rows of repeated tokens are sums
    assert all(torch.equal(gradients[0.1][name], gradient) for name, gradient in gradients[1.0].items())


def test_a_tied_head_keeps_its_whole_gradient():
    gpt, plain = build(embed_grad_shrink=0.0), build()
    for model in (gpt, plain):
        model.embed_gradient = torch.tensor(0.0)
        model(ids(1, 12)).square().sum().backward()
    unseen = sorted(set(range(50)) - set(ids(1, 12).flatten().tolist()))
    assert torch.equal(gpt.wte.weight.grad[unseen], plain.wte.weight.grad[unseen])  # these rows were only in the head
    assert not torch.equal(gpt.wte.weight.grad, plain.wte.weight.grad)


@pytest.mark.parametrize(
    ("place", "modules"),
    [
        ("post_sublayer", ["attention_output_norm", "mlp_output_norm"]),
        ("sandwich", ["attention_output_norm", "mlp_output_norm"]),
        ("normformer", ["attention_output_norm"]),
    ],
)
def test_norms_after_sublayers_give_what_is_added_rms_one(place, modules):
    gpt, seen = build(norm_position=place, norm_eps=1e-12), []
    for name in modules:
        gpt.blocks[1].get_submodule(name).register_forward_hook(lambda _, args, y: seen.append(y))
    gpt(ids(2, 12))
    assert len(seen) == len(modules)
    for y in seen:
        torch.testing.assert_close(y.square().mean(-1), torch.ones(2, 12))


def test_a_block_by_hand_for_every_norm_position():
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(2))
    for place in ("pre", "post_sublayer", "sandwich", "normformer"):
        gpt = build(norm_position=place)
        block, context = gpt.blocks[0], gpt.attention_context(6, None, x.device)

        def norm(y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(y, (32,))

        attended = block.attention(x if place == "post_sublayer" else norm(x), context)
        middle = x + (attended if place == "pre" else norm(attended))
        fed = block.mlp(middle if place == "post_sublayer" else norm(middle))
        expected = middle + (norm(fed) if place in ("post_sublayer", "sandwich") else fed)
        torch.testing.assert_close(block(x, context), expected)


@pytest.mark.parametrize("precision", ["autocast", "bf16 weights"])
def test_residual_stream_in_fp32_holds_what_bf16_would_lose(precision):
    streams = {}
    for wide in (False, True):
        gpt = build(residual_fp32=wide, position="rope")
        if precision == "bf16 weights":
            gpt = gpt.bfloat16()
        seen = []
        for block in gpt.blocks:
            block.attention.qkv.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            x = gpt.embed(ids(1, 8))
            context = gpt.attention_context(8, None, x.device)
            streams[wide] = gpt.blocks[1](gpt.blocks[0](x, context), context)
            assert gpt(ids(1, 8)).dtype == torch.bfloat16
        assert set(seen) == {torch.bfloat16}  # sub-layers compute in bf16 either way
    assert (streams[False].dtype, streams[True].dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(streams[True], streams[True].bfloat16().float())


def test_zero_centred_gains_start_the_same_model():
    torch.testing.assert_close(
        build(norm_gain="zero_centred", qk_norm="rmsnorm", norm_position="normformer")(ids(2, 12)),
        build(qk_norm="rmsnorm", norm_position="normformer")(ids(2, 12)),
    )


@pytest.mark.parametrize("fields", [{}, {"qk_norm": "rmsnorm"}])
def test_layer_scaling_divides_by_the_number_of_the_layer_and_megatron_multiplies_again(fields):
    def logits(scaling: str, **more) -> torch.Tensor:
        return build(init_std=0.5, qk_layer_scaling=scaling, **fields, **more)(ids(2, 12))

    plain = logits("none")
    torch.testing.assert_close(logits("megatron"), plain, atol=1e-4, rtol=1e-4)
    assert (logits("hf_inverse_layer") - plain).abs().max() > 1e-2
    torch.testing.assert_close(logits("hf_inverse_layer", n_layer=1), logits("none", n_layer=1))  # number 1 is neutral


def test_residual_stream_and_logits_have_the_autocast_dtype():
    gpt, seen = build(position="rope", qk_norm="layernorm"), []
    for block in gpt.blocks:
        block.register_forward_hook(lambda _, args, y: seen.append((y.dtype, args[1].rope.cos.dtype)))
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
            return gpt.head(torch.ones(1, 1, 32, dtype=torch.bfloat16))[0, 0, 0]

    assert logit(head_fp32=True).dtype == torch.float32
    assert logit(head_fp32=True).item() == 32 * (1 + 2**-10)
    assert logit(head_fp32=False).item() == 32.0


def test_fp32_head_multiplies_bf16_weights_in_fp32():
    gpt = build(head_fp32=True, tied=False).bfloat16()
    hidden = torch.randn(1, 3, 32).bfloat16()
    torch.testing.assert_close(gpt.head(hidden), hidden.float() @ gpt.head.weight.float().T)


def test_dropout_acts_in_training_only():
    gpt = build(dropout=0.5)
    torch.manual_seed(0)
    assert not torch.equal(gpt(ids(1, 8)), gpt(ids(1, 8)))
    assert torch.equal(gpt.eval()(ids(1, 8)), gpt(ids(1, 8)))
    assert torch.equal(gpt(ids(1, 8)), build()(ids(1, 8)))


@pytest.mark.parametrize(
    ("field", "rates"),
    [("embed_dropout", (0.5, 0, 0)), ("attention_dropout", (0, 0.5, 0)), ("residual_dropout", (0, 0, 0.5))],
)
def test_each_dropout_can_be_set_apart(field, rates):
    def found(gpt: GPT) -> tuple[float, float, float]:
        return gpt.dropout.p, gpt.blocks[1].attention.dropout.p, gpt.blocks[1].dropout.p

    assert found(build(**{field: 0.5})) == rates
    assert found(build(dropout=0.5, **{field: 0.0})) == tuple(0.5 - rate for rate in rates)


def test_without_embedding_dropout_the_embedding_is_deterministic():
    gpt = build(dropout=0.5, embed_dropout=0.0)
    assert torch.equal(gpt.embed(ids(1, 8)), gpt.embed(ids(1, 8)))
    assert not torch.equal(gpt(ids(1, 8)), gpt(ids(1, 8)))


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
        block.register_forward_hook(lambda block, args, y: seen.append((y.dtype, args[1].rope.cos.dtype)))
        block.attention.qkv.register_forward_pre_hook(lambda qkv, args: seen.append((args[0].dtype, qkv.weight.dtype)))
    gpt.norm.register_forward_hook(lambda norm, args, y: seen.append((y.dtype, norm.weight.dtype)))
    bf16, fp32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16), MixedPrecisionPolicy(cast_forward_inputs=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for norm in filter(is_norm_or_gain, gpt.modules()):
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


def test_bf16_shards_leave_gains_and_an_fp32_stream_alone():
    seen: dict[str, set[torch.dtype]] = {}

    def note(name: str, *tensors: torch.Tensor) -> None:
        seen.setdefault(name, set()).update(tensor.dtype for tensor in tensors)

    def watch(trainer) -> None:
        for block in trainer.lightning_module.gpt.blocks:
            attention = block.attention
            block.register_forward_hook(lambda _, args, y: note("stream", y))
            attention.qkv.register_forward_pre_hook(lambda qkv, args: note("matrices", args[0], qkv.weight))
            attention.head_scale.register_forward_hook(lambda scale, args, y: note("gains", scale.weight))
            attention.qk_scale.register_forward_hook(lambda scale, args, y: note("gains", scale.scale))
            block.mlp.inner_norm.register_forward_hook(lambda norm, args, y: note("gains", norm.weight))

    options = {"norm_position": "normformer", "qk_norm": "l2", "residual_fp32": True, "norm_gain": "zero_centred"}
    run = fit("fsdp2", steps=2, precision="bf16-mixed", callbacks=(Watch("on_train_start", watch),), **options)
    assert seen == {"stream": {torch.float32}, "matrices": {torch.bfloat16}, "gains": {torch.float32}}
    assert all(torch.isfinite(weight).all() for weight in run.weights.values())


def test_block_compiles_as_one_graph_and_once_for_all_blocks():
    gpt = build(
        position="rope", qk_norm="l2", mlp="swiglu", norm_position="normformer", n_kv_head=2,
        qk_layer_scaling="hf_inverse_layer", residual_fp32=True,
    )  # fmt: skip
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
    context = gpt.attention_context(12, None, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        x = gpt.embed(ids(2, 12))
        assert x.dtype == torch.float32
        for block in gpt.blocks:
            x = block(x, context)
            assert x.dtype == torch.bfloat16
    assert len(graphs) == 1
