"""Attention kernels that only CUDA has, against the formula written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_stable.model.config import GPTConfig
from lit_stable.model.kernel_report import describe_attention
from lit_stable.model.sharding import build_gpt

pytestmark = pytest.mark.gpu

LENGTH, VOCAB = 256, 512
CUDA = torch.device("cuda")
VARIANTS: list[dict[str, Any]] = [
    {"position": "alibi"},
    {"attention_soft_cap": 5.0},
    {"document_mask": True, "reset_positions": True},
    {"document_mask": True, "position": "rope", "qk_norm": "rmsnorm", "n_kv_head": 2},
    {"document_mask": True, "position": "alibi", "qk_norm": "l2", "attention_soft_cap": 20.0, "n_kv_head": 1},
    {"position": "alibi", "norm_position": "normformer", "qk_layer_scaling": "hf_inverse_layer", "residual_fp32": True},
]
named = pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: "-".join(map(str, fields.values())))


def build(compiled: bool, **fields: Any) -> Any:
    config = GPTConfig(vocab_size=VOCAB, n_layer=2, n_head=4, d_model=256, max_length=LENGTH, **fields)
    return build_gpt(config, seed=1, device=CUDA, compile="blocks" if compiled else "off")


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=generator)
    ends = torch.rand(3, LENGTH, generator=generator) < 0.02
    return ids.to(CUDA), (ends.cumsum(1) - ends.long()).to(CUDA)


def logits_and_gradients(gpt: Any, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, documents = inputs(seed)
    gpt.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = gpt(ids, documents if gpt.config.document_mask else None)
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    return logits.detach().float(), {name: p.grad.clone() for name, p in gpt.named_parameters()}


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()


@named
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
def test_flex_attention_equals_the_formula(fields: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """Values and every gradient; the tolerance is that of the dtype's matrix products."""
    torch._dynamo.reset()
    flex, explicit = build(True, **fields), build(False, attention_kernel="explicit", **fields)
    assert describe_attention(flex, LENGTH, dtype, CUDA) == "FlexAttention"
    for seed in (0, 1):  # another mask each time
        (logits, gradients), (expected, reference) = (
            logits_and_gradients(gpt, seed, dtype) for gpt in (flex, explicit)
        )
        assert relative(logits, expected) < tolerance
        for name, gradient in gradients.items():
            assert relative(gradient, reference[name]) < 3 * tolerance, name


def test_one_compilation_serves_all_blocks_and_all_masks() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gpt = build(True, document_mask=True, position="alibi", qk_layer_scaling="hf_inverse_layer")
    logits_and_gradients(gpt, 0, torch.bfloat16)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed in (1, 2, 3):
        logits_and_gradients(gpt, seed, torch.bfloat16)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize(
    ("fields", "dtype", "kernels"),
    [
        ({}, torch.bfloat16, ("flash", "cuDNN")),
        ({"n_kv_head": 2}, torch.bfloat16, ("flash", "cuDNN")),
        ({}, torch.float32, ("memory-efficient",)),
        ({"n_kv_head": 2}, torch.float32, ("memory-efficient",)),
        ({"document_mask": True}, torch.bfloat16, ("memory-efficient", "cuDNN")),  # not compiled, so with a mask
    ],
    ids=str,
)
def test_the_kernel_that_is_named_is_a_fast_one(
    fields: dict[str, Any], dtype: torch.dtype, kernels: tuple[str, ...]
) -> None:
    said = describe_attention(build(False, **fields), LENGTH, dtype, CUDA)
    assert any(said.startswith(f"scaled_dot_product_attention, {kernel} kernel") for kernel in kernels), said


@named
def test_a_training_step_waits_for_no_result(fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    gpt = build(True, **fields)
    logits_and_gradients(gpt, 0, torch.bfloat16)  # compiles, and copies what is copied once
    ids, documents = inputs(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            logits = gpt(ids, documents if gpt.config.document_mask else None)
        logits.float().square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
