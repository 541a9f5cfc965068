"""What torch's compiler keeps of a block for its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise

SIZES: dict[str, Any] = {"vocab_size": 50, "n_layer": 1, "n_head": 4, "d_model": 32, "max_length": 12}


@pytest.mark.parametrize("options", [{}, {"norm_position": "sandwich"}, {"norm": "rmsnorm", "mlp": "swiglu"}], ids=str)
def test_the_stream_between_attention_and_mlp_is_kept_and_not_added_up_again(options: dict[str, Any]) -> None:
    gpt = GPT(GPTConfig(**SIZES, **options))
    initialise(gpt, seed=1)
    block, context = gpt.blocks[0], gpt.attention_context(12, None, torch.device("cpu"))
    x = torch.randn(2, 12, 32, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    torch._dynamo.reset()
    compiled = torch.compile(block.residual, backend="aot_eager_decomp_partition", dynamic=False)
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(keep, lambda tensor: tensor):
        out, between = compiled(x, context)
    assert not between.requires_grad
    streams = [t.data_ptr() for t in kept if t.shape == x.shape and t.dtype == x.dtype]
    assert {x.data_ptr(), between.data_ptr()} <= set(streams)
    weights = list(block.parameters())
    found = torch.autograd.grad(out.float().square().sum(), [x, *weights])
    with torch.autocast("cpu", torch.bfloat16):
        plain = block(x, context)
    expected = torch.autograd.grad(plain.float().square().sum(), [x, *weights])
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
