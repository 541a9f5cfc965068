"""The loss of a step and its parts over a window."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lit_stable.training_loss import TrainingLoss


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 7, generator=generator), torch.randint(0, 7, (2, 3), generator=generator)


def test_without_a_weight_it_is_the_cross_entropy_and_nothing_else():
    loss, (logits, labels) = TrainingLoss(), batch(0)
    value, sums, counts = loss(logits, labels)
    assert value.item() == pytest.approx(F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item(), rel=1e-6)
    assert set(loss.window(lambda mean: mean)) == {"loss"}
    assert (sums.sum() / counts.sum()).item() == value.item()


def test_of_losses_it_is_that_of_the_logits_they_are_of():
    logits, labels = batch(0)
    labels[1, 0] = -100
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    for ours, theirs in zip(TrainingLoss()(losses, labels), TrainingLoss()(logits, labels), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_parts_are_means_over_the_window_and_add_up_to_what_is_minimised():
    loss, weight = TrainingLoss(0.3), 0.3
    totals, entropies, squares = [], [], []
    for seed in (0, 1):
        logits, labels = batch(seed)
        totals.append(loss(logits, labels)[0])
        entropies.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        squares.append(logits.logsumexp(-1).square().mean())
    parts = loss.window(lambda mean: mean)
    torch.testing.assert_close(parts["loss"], torch.stack(entropies).mean())
    torch.testing.assert_close(parts["z_loss"], weight * torch.stack(squares).mean())
    torch.testing.assert_close(torch.stack(totals).mean(), parts["loss"] + parts["z_loss"])


def test_a_window_begins_empty():
    loss = TrainingLoss()
    loss(*batch(0))
    assert loss.window(None) == {}
    loss(*batch(1))
    loss.clear()
    value, *_ = loss(*batch(2))
    assert torch.equal(loss.window(lambda mean: mean)["loss"], value)


def test_what_is_compiled_is_what_is_called(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    loss = TrainingLoss(1e-4)
    loss.compile(dynamic=False)
    loss(*batch(0))
    assert asked == [{"dynamic": False}]
    assert "z_loss" in loss.window(lambda mean: mean)


@pytest.mark.parametrize("weight", [-1e-4, float("nan"), float("inf")])
def test_a_weight_out_of_range_is_refused(weight):
    with pytest.raises(ValueError, match=rf"model\.z_loss={weight}: must be a finite number >= 0\."):
        TrainingLoss(weight)
