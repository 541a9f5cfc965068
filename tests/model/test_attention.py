"""Attention against the formula, head by head, in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from lit_stable.model.alibi import alibi_slopes
from lit_stable.model.attention import Attention
from lit_stable.model.attention_context import AttentionContext
from lit_stable.model.attention_kernels import choose_kernel
from lit_stable.model.config import GPTConfig
from lit_stable.model.rotary import Rotary

LENGTH, LAYER = 7, 2
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]])


def config(**fields) -> GPTConfig:
    return GPTConfig(**{"d_model": 48, "n_head": 6, "n_layer": 3, "max_length": LENGTH, **fields})


def context_of(config: GPTConfig, documents: torch.Tensor | None = None, kernel: str | None = None):
    kernel = kernel or choose_kernel(
        config, documents=documents is not None, device_type="cpu", compiled=False, drops=False
    )
    return AttentionContext(config, LENGTH, documents, kernel, torch.device("cpu"))


def run(config: GPTConfig, x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
    context = context_of(config, documents)
    return attention_of(config)(x, context, context.layer(LAYER - 1))


def attention_of(config: GPTConfig) -> Attention:
    torch.manual_seed(0)
    attention = Attention(config)
    for name, parameter in attention.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "qkv" in name:
            parameter.data.mul_(4)  # so that scores are far from uniform
    return attention


def by_hand(config: GPTConfig, x: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
    """Each query head by itself, from rows of the fused projection."""
    attention, x = attention_of(config).double(), x.double()
    size, queries = config.head_size, config.n_head // config.kv_heads
    rows = attention.qkv.weight.view(config.kv_heads, queries + 2, size, -1)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(len(x), -1, -1)
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None, :])
    outputs = []
    for head in range(config.n_head):
        group, place = divmod(head, queries)
        q, k, v = (x @ rows[group, row].T for row in (place, queries, queries + 1))
        if config.qk_norm == "l2":
            q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        else:
            q, k = attention.q_norm(q), attention.k_norm(k)
        if config.position == "rope":
            rope = Rotary(LENGTH, size, config.rope_theta, x.device)
            q, k = (rope.rotate(part[:, :, None])[:, :, 0].double() for part in (q, k))
        scores = q @ k.transpose(1, 2)
        if config.qk_norm == "l2":
            scores = scores * (attention.qk_scale.scale if config.qk_l2_scale == "learned" else config.qk_l2_scale)
        else:
            scores = scores / math.sqrt(size)
        if config.qk_layer_scaling == "hf_inverse_layer":
            scores = scores / LAYER
        if config.attention_soft_cap is not None:
            scores = config.attention_soft_cap * torch.tanh(scores / config.attention_soft_cap)
        if config.position == "alibi":
            distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
            scores = scores - alibi_slopes(config.n_head)[head] * distance
        y = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v
        outputs.append(y * attention.head_scale.weight[head] if config.norm_position == "normformer" else y)
    return (torch.cat(outputs, -1) @ attention.out.weight.T).float()


POSITIONS = ("learned", "rope", "alibi")
VARIANTS = [
    *[{"qk_norm": norm, "position": p} for norm in ("none", "layernorm", "rmsnorm", "l2") for p in POSITIONS],
    *[{"n_kv_head": heads, "position": "rope", "qk_norm": "rmsnorm"} for heads in (1, 2, 3)],
    {"qk_norm": "l2", "qk_l2_scale": 5.0},
    {"attention_scale": "pre_sqrt"},
    {"qk_layer_scaling": "megatron"},
    {"qk_layer_scaling": "hf_inverse_layer", "qk_norm": "l2"},
    {"attention_soft_cap": 0.7},
    {"attention_soft_cap": 0.7, "position": "alibi", "n_kv_head": 2},
    {"attention_kernel": "explicit", "n_kv_head": 2},
    {"norm_position": "normformer"},
]


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_attention_equals_the_formula(fields, documents):
    x = torch.randn(2, LENGTH, 48, generator=torch.Generator().manual_seed(1))
    expected = by_hand(config(**fields), x, documents)
    torch.testing.assert_close(run(config(**fields), x, documents), expected, atol=1e-5, rtol=1e-4)


def test_every_variant_is_another_function():
    x = torch.randn(2, LENGTH, 48, generator=torch.Generator().manual_seed(1))
    neutral = ({"attention_scale": "pre_sqrt"}, {"qk_layer_scaling": "megatron"})  # in exact arithmetic
    plain = run(config(), x)
    for fields in VARIANTS[1:]:
        difference = (run(config(**fields), x) - plain).abs().max()
        assert (difference < 1e-5) == (fields in neutral), fields


def test_fewer_key_heads_are_key_heads_repeated():
    torch.manual_seed(0)
    grouped, whole = Attention(config(n_kv_head=2)), Attention(config())
    rows = grouped.qkv.weight.view(2, 5, 8, 48)  # two groups of three queries, a key and a value
    repeated = torch.stack([torch.stack([rows[h // 3, row] for row in (h % 3, 3, 4)]) for h in range(6)])
    whole.load_state_dict({"qkv.weight": repeated.view(-1, 48), "out.weight": grouped.out.weight})
    x = torch.randn(2, LENGTH, 48)
    outputs = [attention(x, context_of(config())) for attention in (grouped, whole)]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_qk_norm_bounds_queries_and_keys_per_head(kind):
    torch.manual_seed(0)
    attention = Attention(config(d_model=32, n_head=4, qk_norm=kind))
    attention.qkv.weight.data.mul_(1000)
    seen = {}
    for name in ("q_norm", "k_norm"):
        getattr(attention, name).register_forward_hook(lambda _, args, y, name=name: seen.update({name: y}))
    attention(torch.randn(2, LENGTH, 32), context_of(config(d_model=32, n_head=4)))
    assert seen["q_norm"].shape == (2, LENGTH, 4, 8)
    for y in seen.values():
        torch.testing.assert_close(y.square().mean(-1).sqrt(), torch.ones(2, LENGTH, 4))
    logits = torch.einsum("bthk,bshk->bhts", seen["q_norm"], seen["k_norm"]) / math.sqrt(8)
    assert logits.max() <= math.sqrt(8) * (1 + 1e-5)
    assert attention.q_norm.weight.shape == (8,)  # one gain for all heads


@pytest.mark.parametrize(
    "fields",
    [{}, {"attention_scale": "pre_sqrt"}, {"qk_layer_scaling": "megatron"}],
    ids=["post", "pre_sqrt", "megatron"],
)
def test_what_overflows_in_fp16(fields):
    """Scores of about 1e5 / sqrt(128): the product overflows fp16, unless it is made smaller before."""
    options = config(d_model=128, n_head=1, attention_kernel="explicit", **fields)
    attention = Attention(options).half()
    attention.qkv.weight.data.zero_()
    attention.out.weight.data.copy_(torch.eye(128))
    attention.qkv.weight.data[:256] = torch.eye(128).repeat(2, 1) * 30  # queries and keys
    attention.qkv.weight.data[256:] = torch.eye(128)
    x = torch.ones(1, LENGTH, 128).half()  # every score is 900 * 128 = 115 200, of which fp16 holds 65 504
    context = context_of(options)
    finite = attention(x, context, context.layer(LAYER - 1)).isfinite().all().item()
    assert finite == bool(fields)
