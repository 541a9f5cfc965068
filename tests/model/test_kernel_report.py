"""The kernel that is named is the one that ran."""

from __future__ import annotations

import pytest
import torch

from lit_stable.model import gpt as gpt_file
from lit_stable.model import kernel_report
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.kernel_report import describe_attention

SDPA = "scaled_dot_product_attention"


def build(**fields) -> GPT:
    return GPT(GPTConfig(vocab_size=50, n_layer=1, n_head=4, d_model=64, max_length=32, **fields))


def describe(dtype: torch.dtype = torch.float32, **fields) -> str:
    return describe_attention(build(**fields), 32, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, f"{SDPA}, flash kernel"),
        ({"n_kv_head": 2, "qk_norm": "l2", "qk_layer_scaling": "hf_inverse_layer"}, f"{SDPA}, flash kernel"),
        ({"attention_dropout": 0.1}, f"{SDPA}, math kernel"),  # on CPUs flash does not drop
        ({"document_mask": True}, f"{SDPA}, flash kernel, with a mask of all scores"),
        ({"position": "alibi"}, f"{SDPA}, flash kernel, with a mask of all scores"),
        ({"attention_soft_cap": 50.0}, "explicit: scores written out, softmax in fp32"),
        ({"qk_layer_scaling": "megatron"}, "explicit: scores written out, softmax in fp32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_on_a_cpu(fields, expected, dtype):
    assert describe(dtype, **fields) == expected


@pytest.mark.parametrize(
    ("backward", "name"),
    [
        ("ScaledDotProductFlashAttentionBackward0", "flash"),
        ("ScaledDotProductCudnnAttentionBackward0", "cuDNN"),
        ("ScaledDotProductEfficientAttentionBackward0", "memory-efficient"),
        ("UnsafeViewBackward0", "math"),
    ],
)
def test_names_of_kernels_that_only_gpus_have(backward, name, monkeypatch):
    class Output:
        class grad_fn:
            name = staticmethod(lambda: backward)

    monkeypatch.setattr(kernel_report, "attend", lambda *args: Output)
    assert describe() == f"{SDPA}, {name} kernel"


def test_flex_is_what_the_blocks_take_when_they_are_told_so(monkeypatch):
    monkeypatch.setattr(gpt_file, "choose_kernel", lambda *args, **options: "flex")
    assert describe() == "FlexAttention"


def test_random_numbers_are_not_used_up():
    gpt, before = build(attention_dropout=0.1), torch.get_rng_state()
    describe_attention(gpt, 32, torch.float32, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
