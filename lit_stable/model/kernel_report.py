"""Which attention kernel runs, said by what has run."""

from __future__ import annotations

from typing import Any

import torch

from lit_stable.model.attention_kernels import attend
from lit_stable.model.gpt import GPT

# Beginnings of what torch calls the backward of each kernel; the plain formula has no backward of its own.
_SDPA_KERNELS = {
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductCudnnAttention": "cuDNN",
    "ScaledDotProductEfficientAttention": "memory-efficient",
    "ScaledDotProductFusedAttention": "the device's own",
}


def describe_attention(gpt: GPT, length: int, dtype: torch.dtype, device: torch.device) -> str:
    """How attention runs in training on ``length`` tokens, for the first lines of a run.

    torch chooses among its kernels by dtype, sizes and device and does not say which. So one sample of zeros passes
    through the very function that the blocks call, and its backward names the kernel. Call it as the forward pass is
    called, under the same autocast.

    Args:
        dtype: Of queries, keys and values as the blocks make them.
    """
    config = gpt.config
    documents = torch.zeros(1, length, dtype=torch.long, device=device) if config.document_mask else None
    context = gpt.attention_context(length, documents, device)
    kernel = context.past.kernel
    if kernel == "flex":
        return "FlexAttention"
    if kernel == "explicit":
        return "explicit: scores written out, softmax in fp32"
    attention: Any = gpt.blocks[0].attention
    q, k, v = (
        torch.zeros(1, heads, length, config.head_size, dtype=dtype, device=device, requires_grad=True)
        for heads in (config.n_head, config.kv_heads, config.kv_heads)
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        y = attend(q, k, v, attention.rules, context.past, context.layer(0), attention.dropout.p)
    backward = "" if y.grad_fn is None else y.grad_fn.name()
    used = next((name for start, name in _SDPA_KERNELS.items() if backward.startswith(start)), "math")
    mask = ", with a mask of all scores" if kernel == "masked" else ""
    return f"scaled_dot_product_attention, {used} kernel{mask}"
