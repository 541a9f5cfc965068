"""The loss: fp32 for any logits, ignored labels, sums per sample."""

from __future__ import annotations

import math

import pytest
import torch

from lit_stable.model.loss import sample_losses, sample_losses_with_z


def test_uniform_logits_cost_log_vocabulary_per_label():
    labels = torch.tensor([[0, 1, -100], [2, -100, -100]])
    sums, counts = sample_losses(torch.zeros(2, 3, 10), labels)
    assert counts.tolist() == [2, 1]
    assert sums.tolist() == pytest.approx([2 * math.log(10), math.log(10)])


def test_bf16_logits_give_the_fp32_loss():
    torch.manual_seed(0)
    logits, labels = (3 * torch.randn(2, 8, 4096)).bfloat16(), torch.randint(0, 4096, (2, 8))
    expected = -logits.double().log_softmax(-1).gather(-1, labels[..., None]).sum((1, 2))
    sums, _ = sample_losses(logits, labels)
    assert sums.dtype == torch.float32
    assert sums.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_each_sample_has_its_own():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    labels[1, 2:] = -100
    sums, counts = sample_losses(logits, labels)
    assert counts.tolist() == [5, 2, 5]
    assert sums[1:2].tolist() == pytest.approx(sample_losses(logits[1:2], labels[1:2])[0].tolist())


def test_nothing_to_predict_is_zero_and_not_nan():
    logits = torch.randn(1, 2, 5, requires_grad=True)
    sums, counts = sample_losses(logits, torch.full((1, 2), -100))
    sums.sum().backward()
    assert (sums.tolist(), counts.tolist()) == ([0.0], [0])
    assert not logits.grad.any()


def test_z_loss_is_the_squared_log_of_the_denominator_over_labelled_positions():
    torch.manual_seed(0)
    logits, labels = (2 * torch.randn(2, 3, 7)).requires_grad_(), torch.tensor([[1, -100, 2], [-100, 6, 0]])
    *losses, squares = sample_losses_with_z(logits, labels)
    assert all(torch.equal(mine, plain) for mine, plain in zip(losses, sample_losses(logits, labels), strict=True))
    kept = labels != -100
    log_z = logits.double().exp().sum(-1).log()
    assert squares.tolist() == pytest.approx((log_z**2 * kept).sum(1).tolist(), rel=1e-6)
    (gradient,) = torch.autograd.grad(squares.sum(), logits)
    expected = 2 * log_z[..., None] * logits.double().softmax(-1) * kept[..., None]
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


def test_z_loss_of_bf16_logits_is_fp32():
    logits = (50 + torch.randn(1, 4, 4096)).bfloat16()
    z = sample_losses_with_z(logits, torch.zeros(1, 4, dtype=torch.long))[2]
    assert z.dtype == torch.float32
    assert z.item() == pytest.approx(logits.double().logsumexp(-1).square().sum().item(), rel=1e-6)
