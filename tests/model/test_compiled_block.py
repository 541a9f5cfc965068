"""What torch's compiler keeps of a block for its backward pass, and how often it compiles the embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compilation_counts import count_compilations, stand_in
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise
from lit_stable.model.recompute import Recompute, recomputing

SIZES: dict[str, Any] = {"vocab_size": 50, "n_layer": 1, "n_head": 4, "d_model": 32, "max_length": 12}
CPU = torch.device("cpu")


def build(**options: Any) -> GPT:
    gpt = GPT(GPTConfig(**SIZES, **options))
    initialise(gpt, seed=1)
    return gpt


def compiled_block(gpt: GPT, residual: Callable[..., Any]) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """The input of its compiled function, both outputs, and what is kept besides parameters, in 16-bit autocast."""
    x = torch.randn(2, 12, 32, dtype=torch.float32 if gpt.config.residual_fp32 else torch.bfloat16, requires_grad=True)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.data_ptr()] = tensor
        return tensor

    torch._dynamo.reset()
    compiled = torch.compile(residual, backend="aot_eager_decomp_partition", dynamic=False)
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(keep, lambda tensor: tensor):
        out, between = compiled(x, gpt.attention_context(12, None, CPU))
    return x, out, between, list(kept.values())


@pytest.mark.parametrize("options", [{}, {"norm": "rmsnorm", "mlp": "swiglu"}, {"dropout": 0.1}], ids=str)
def test_the_stream_between_attention_and_mlp_is_kept(options: dict[str, Any]) -> None:
    gpt = build(**options)
    x, out, between, kept = compiled_block(gpt, gpt.blocks[0].residual)
    assert between is not None
    assert not between.requires_grad
    assert {x.data_ptr(), between.data_ptr()} <= {tensor.data_ptr() for tensor in kept}
    if not options.get("dropout"):
        wanted = [x, *gpt.blocks[0].parameters()]
        found = torch.autograd.grad(out.float().square().sum(), wanted)
        with torch.autocast("cpu", torch.bfloat16):
            plain = gpt.blocks[0](x, gpt.attention_context(12, None, CPU))
        torch.testing.assert_close(out, plain)
        expected = torch.autograd.grad(plain.float().square().sum(), wanted)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, False),
        ({}, True),
        ({}, "selective"),
        ({"dropout": 0.1}, False),
        ({"norm_position": "sandwich"}, False),
        ({"norm_position": "normformer"}, False),
        ({"norm_position": "post_sublayer"}, False),
        ({"residual_fp32": True}, False),
    ],
    ids=str,
)
def test_no_block_keeps_more_for_it(options: dict[str, Any], how: Recompute) -> None:
    gpt = build(**options)
    residual = gpt.blocks[0].residual

    def without(*args: Any) -> tuple[Tensor, None]:
        return residual(*args)[0], None

    sizes = []
    for function in (residual, without):
        *_, kept = compiled_block(gpt, recomputing(function, how))
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in kept))
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position": "rope", "embed_norm": True},
        {"embed_grad_shrink": 0.1},
        {"reset_positions": True, "document_mask": True},
    ],
    ids=str,
)
def test_the_embedding_is_one_graph_whatever_share_of_its_gradient_it_gets(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = build(**options).train()
    graphs = count_compilations(monkeypatch, stand_in)
    compiled = torch.compile(gpt.enter, dynamic=False)
    ids, documents = torch.randint(50, (2, 12)), torch.arange(12).expand(2, 12) // 5
    for share in (0.1, 0.5, 1.0):
        gpt.embed_gradient = torch.tensor(share)
        (ours,) = torch.autograd.grad(compiled(ids, documents).square().sum(), gpt.wte.weight)
        (theirs,) = torch.autograd.grad(gpt.enter(ids, documents).square().sum(), gpt.wte.weight)
        torch.testing.assert_close(ours, theirs)
    assert graphs == {"enter": 1}
