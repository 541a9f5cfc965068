"""Which kernel the options allow, and that all of them compute the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from lit_stable.callbacks.extra_forward import uncompiled
from lit_stable.model import attention_context, attention_kernels, gpt
from lit_stable.model.attention import Attention
from lit_stable.model.attention_context import AttentionContext
from lit_stable.model.attention_kernels import ScoreRules, attend, choose_kernel
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise

CPU = torch.device("cpu")
LENGTH = 40
DOCUMENTS = torch.tensor([[0] * 15 + [1] * 25, [0] * 39 + [1]])


def config(**fields) -> GPTConfig:
    return GPTConfig(**{"vocab_size": 50, "n_layer": 2, "n_head": 4, "d_model": 64, "max_length": LENGTH, **fields})


@pytest.mark.parametrize(
    ("fields", "documents", "kernels"),
    [  # kernels: CPU; CUDA; CUDA, compiled; CUDA, compiled, with attention dropout
        ({}, False, "sdpa sdpa sdpa sdpa"),
        ({"attention_scale": "pre_sqrt", "qk_norm": "rmsnorm", "n_kv_head": 2}, False, "sdpa sdpa sdpa sdpa"),
        ({"qk_layer_scaling": "hf_inverse_layer"}, False, "sdpa sdpa sdpa sdpa"),
        ({}, True, "masked masked flex masked"),
        ({"position": "alibi"}, False, "masked explicit flex explicit"),
        ({"position": "alibi"}, True, "masked explicit flex explicit"),
        ({"attention_soft_cap": 50.0}, False, "explicit explicit flex explicit"),
        ({"attention_soft_cap": 50.0, "d_model": 32}, False, "explicit explicit explicit explicit"),  # heads of 8
        ({"qk_layer_scaling": "megatron"}, False, "explicit explicit explicit explicit"),
        ({"attention_kernel": "explicit"}, True, "explicit explicit explicit explicit"),
    ],
)
def test_the_kernel_follows_from_options_and_device(fields, documents, kernels):
    cases = [("cpu", False, False), ("cuda", False, False), ("cuda", True, False), ("cuda", True, True)]
    chosen = [
        choose_kernel(config(**fields), documents=documents, device_type=device, compiled=compiled, drops=drops)
        for device, compiled, drops in cases
    ]
    assert chosen == kernels.split()


def outputs_of(options: GPTConfig, documents: torch.Tensor | None, kernels: list[str]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (options.n_head, options.kv_heads, options.kv_heads)
    q, k, v = (torch.randn(2, h, LENGTH, 16, generator=generator) for h in heads)
    contexts = [AttentionContext(options, LENGTH, documents, kernel, CPU) for kernel in kernels]
    return [attend(q, k, v, ScoreRules.of(options), context.past) for context in contexts]


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("fields", [{}, {"position": "alibi"}, {"n_kv_head": 2}, {"n_kv_head": 1, "position": "alibi"}])
def test_masked_equals_explicit(fields, documents):
    torch.testing.assert_close(*outputs_of(config(**fields), documents, ["masked", "explicit"]))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"position": "alibi"},
        {"attention_soft_cap": 0.5},
        {"position": "alibi", "attention_soft_cap": 0.5, "n_kv_head": 2},
    ],
)
def test_flex_equals_explicit(fields, documents, monkeypatch):
    """Its rules, uncompiled; the compiled kernel is for tests/gpu."""
    monkeypatch.setattr(attention_context, "_compiled_create", lambda: create_block_mask)
    torch.testing.assert_close(*outputs_of(config(**fields), documents, ["flex", "explicit"]))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["masked", "explicit", "flex"])
def test_some_of_the_heads_are_treated_as_they_are_among_all(kernel):
    options = config(position="alibi")
    q, k, v = (torch.randn(2, 4, LENGTH, 16) for _ in range(3))
    past = AttentionContext(options, LENGTH, None, kernel, CPU).past
    whole = attend(q, k, v, ScoreRules.of(options), past)
    for first in (0, 2):
        here = slice(first, first + 2)
        part = attend(q[:, here], k[:, here], v[:, here], ScoreRules.of(options), past.of(here))
        torch.testing.assert_close(part, whole[:, here])


def test_heads_that_are_all_treated_alike_share_one_mask():
    for documents, kernel in ((None, "sdpa"), (DOCUMENTS, "masked"), (DOCUMENTS, "explicit")):
        past = AttentionContext(config(), LENGTH, documents, kernel, CPU).past
        assert past.of(slice(2, 4)).mask is past.mask


def test_attention_on_some_of_the_heads_takes_their_part_of_the_mask():
    options = config(position="alibi")
    torch.manual_seed(0)
    whole, part = Attention(options), Attention(options)
    x, context = torch.randn(2, LENGTH, 64), AttentionContext(options, LENGTH, None, "masked", CPU)
    summed = torch.zeros(2, LENGTH, 64)
    for first in (0, 2):  # as two devices hold the rows of the one projection and the columns of the other
        part.first_head = first
        part.qkv.weight = torch.nn.Parameter(whole.qkv.weight[48 * first : 48 * (first + 2)])
        part.out.weight = torch.nn.Parameter(whole.out.weight[:, 16 * first : 16 * (first + 2)])
        summed = summed + part(x, context)
    torch.testing.assert_close(summed, whole(x, context))


def test_a_pass_that_nothing_is_compiled_in_takes_no_kernel_that_is_compiled_code(monkeypatch):
    asked = []
    choose = lambda *args, **options: asked.append(options["compiled"]) or "explicit"  # noqa: E731
    monkeypatch.setattr(gpt, "choose_kernel", choose)
    model = gpt.GPT(config(attention_soft_cap=5.0))
    for blocks_compiled in (False, True):
        model.blocks_compiled = blocks_compiled
        model.attention_context(LENGTH, None, CPU)
        with uncompiled():
            model.attention_context(LENGTH, None, CPU)
    assert asked == [False, False, True, False]


@pytest.mark.parametrize("kernel", ["sdpa", "masked"])
def test_a_kernel_that_knows_no_groups_gets_its_keys_repeated(kernel, monkeypatch):
    asked = []
    monkeypatch.setattr(attention_kernels, "_knows_groups", lambda q, kernel: False)
    monkeypatch.setattr(
        attention_kernels.F,
        "scaled_dot_product_attention",
        lambda q, k, v, *args, enable_gqa, **options: asked.append((k.shape[1], v.shape[1], enable_gqa)) or q,
    )
    outputs_of(config(n_kv_head=2), None, [kernel])
    assert asked == [(4, 4, False)]


def test_attention_weights_are_dropped_by_every_kernel_that_drops():
    q, k, v = (torch.randn(2, 4, LENGTH, 16) for _ in range(3))
    for kernel in ("sdpa", "masked", "explicit"):
        past = AttentionContext(config(), LENGTH, None, kernel, CPU).past
        kept, dropped = (attend(q, k, v, ScoreRules.of(config()), past, dropout=rate) for rate in (0.0, 0.5))
        assert not torch.allclose(kept, dropped)
        # Of the first token one weight is left: kept and doubled, or dropped.
        assert set((dropped[:, :, 0] / kept[:, :, 0]).round().unique().tolist()) == {0.0, 2.0}


def test_300_distances_stay_distinct_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        past = AttentionContext(config(position="alibi"), 300, None, "masked", CPU).past
    assert past.mask.dtype == torch.float32
    assert len(past.mask[0, 0, -1].unique()) == 300


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_with_flex_compiles_as_one_graph_and_once_for_all_blocks_and_masks(monkeypatch):
    monkeypatch.setattr(attention_context, "_compiled_create", lambda: create_block_mask)
    monkeypatch.setattr(gpt, "choose_kernel", lambda *args, **options: "flex")
    model = GPT(
        config(position="alibi", attention_soft_cap=2.0, n_kv_head=2, qk_norm="l2", qk_layer_scaling="hf_inverse_layer")
    )
    initialise(model, 1)
    ids, graphs = torch.arange(2 * LENGTH).view(2, LENGTH) % 50, []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        masks = [DOCUMENTS, DOCUMENTS.flip(0)]
        expected = [model(ids, documents) for documents in masks]
        for block in model.blocks:
            block.compile(backend=count, fullgraph=True, dynamic=False)
        for documents, logits in zip(masks, expected, strict=True):
            torch.testing.assert_close(model(ids, documents), logits)
    assert len(graphs) == 1
