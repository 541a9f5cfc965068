"""The kernel of the cross-entropy against fp64, and what it promises about memory and about who keeps the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lit_stable.model.loss import IGNORED, position_losses, sample_losses, sample_losses_with_z

pytestmark = pytest.mark.gpu


def given(vocab: int, dtype: torch.dtype, batch: int = 3, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, labels), some of which are ignored; one row has a logit far above all others."""
    generator = torch.Generator(device="cuda").manual_seed(vocab)
    logits = 4 * torch.randn(batch, length, vocab, generator=generator, device="cuda")
    logits[0, 0, vocab // 2] = 60.0
    labels = torch.randint(vocab, (batch, length), generator=generator, device="cuda")
    labels[1, 2:] = IGNORED
    labels[0, 0], labels[2, 0] = vocab - 1, 0
    return logits.to(dtype).requires_grad_(), labels


def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses, log(Z)), (B, T), in fp64."""
    log_z = logits.double().logsumexp(-1)
    picked = logits.double().gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (log_z - picked) * (labels != IGNORED), log_z


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [7, 1000, 16384, 50304, 128256])
def test_it_is_the_cross_entropy_and_its_gradient(vocab: int, dtype: torch.dtype) -> None:
    logits, labels = given(vocab, dtype)
    reference = logits.detach().double().requires_grad_()
    weights = torch.rand(2, *labels.shape, device="cuda", dtype=torch.float64)  # of each loss and each log(Z)
    found, expected = position_losses(logits.clone(), labels), by_hand(reference, labels)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=2e-6, atol=2e-5)
    torch.stack([w.float() * f for w, f in zip(weights, found, strict=True)]).sum().backward()
    torch.stack([w * f for w, f in zip(weights, expected, strict=True)]).sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    coarse = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=coarse, atol=1e-6)


def test_sums_per_sample_are_those_of_the_cpu() -> None:
    logits, labels = given(1000, torch.float32)
    for function in (sample_losses, sample_losses_with_z):
        on_gpu, on_cpu = function(logits.detach(), labels), function(logits.detach().cpu(), labels.cpu())
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_a_step_needs_no_second_tensor_of_that_size() -> None:
    logits, labels = given(50304, torch.bfloat16, 8, 512)
    size = logits.numel() * 2
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy = logits.clone()  # a leaf's gradient is no place of its own
    sample_losses(copy, labels)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2.2 * size  # the clone, and the gradient of the leaf


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_seen(wrong: float) -> None:
    logits, labels = given(1000, torch.bfloat16)
    with torch.no_grad():
        logits[1, 0, 17] = wrong
    losses, _ = position_losses(logits.clone(), labels)
    assert not losses[1, 0].isfinite()
    assert losses.isfinite().sum() == losses.numel() - 1


def test_a_label_outside_of_the_vocabulary_is_no_number() -> None:
    logits, labels = given(100, torch.float32)
    labels[2, 1], labels[2, 2] = 100, -5
    assert position_losses(logits, labels)[0].isnan().nonzero().tolist() == [[2, 1], [2, 2]]


def test_who_saved_the_logits_for_himself_gets_an_error_and_no_wrong_gradient() -> None:
    logits, labels = given(100, torch.float32)
    x = logits * 1.0
    total: Any = x.square().sum()
    sample_losses(x, labels)[0].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
