"""Head and loss in one node, against fp64; on CUDA the kernel takes the place of what runs here, see tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_stable.model.config import GPTConfig
from lit_stable.model.head import Head
from lit_stable.model.head_loss import HeadLoss

ROWS, VOCAB, WIDTH = 12, 50, 16
LABELS = torch.arange(ROWS) * 4
LABELS[3], LABELS[7] = -100, -100
KINDS = [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)]


def given(operands: torch.dtype) -> tuple[Tensor, Tensor]:
    """(hidden, weight), fp32, in numbers that the operands hold exactly."""
    torch.manual_seed(0)
    tensors = torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH)
    return tuple(t.to(operands).float().requires_grad_() for t in tensors)  # type: ignore[return-value]


def gradients(losses: Tensor, weights: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((losses * weights).sum(), leaves)


@pytest.mark.parametrize(
    "weights", [torch.full((ROWS,), 1 / 7), torch.linspace(-1e-6, 3e-6, ROWS)], ids=["mean", "own"]
)
@pytest.mark.parametrize(("operands", "wide"), KINDS)
def test_losses_and_gradients_are_those_of_fp64(operands: Any, wide: bool, weights: Tensor) -> None:
    hidden, weight = given(operands)
    losses = HeadLoss.apply(hidden, weight, LABELS, operands, wide)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, LABELS, ignore_index=-100, reduction="none")
    coarse = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[operands]
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=1e-5 if wide else 32 * coarse)
    found = gradients(losses, weights, hidden, weight)
    for ours, theirs in zip(found, gradients(expected, weights.double(), *exact), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= 2 * coarse * theirs.norm()
    assert (losses[LABELS == -100] == 0).all()
    assert (found[0][LABELS == -100] == 0).all()


def test_gradients_have_the_dtypes_of_hidden_and_weight_and_losses_are_fp32() -> None:
    hidden, weight = (t.detach().bfloat16().requires_grad_() for t in given(torch.bfloat16))
    losses = HeadLoss.apply(hidden, weight, LABELS, torch.bfloat16, False)
    assert losses.dtype == torch.float32
    assert {g.dtype for g in gradients(losses, torch.ones(ROWS), hidden, weight)} == {torch.bfloat16}


def test_a_wide_head_sees_what_bf16_cannot_hold() -> None:
    # 1 + 2^-10 is 1 in bf16; between two such logits lies 16 * 2^-10.
    hidden, weight = torch.ones(1, WIDTH), torch.ones(2, WIDTH)
    weight[1] += 2**-10
    losses = HeadLoss.apply(hidden, weight, torch.tensor([0]), torch.float16, True)
    assert losses.item() == pytest.approx(F.softplus(torch.tensor(WIDTH * 2**-10)).item(), rel=1e-6)


@pytest.mark.parametrize(("operands", "wide"), KINDS)
@pytest.mark.parametrize("gap", [10.0, 20.0])
def test_gradients_of_what_is_nearly_certain_are_not_lost(operands: Any, wide: bool, gap: float) -> None:
    # Behind 10 nats 1 - p is 0 in bf16 if p is rounded first; behind 20 the other's share is less than fp16 holds.
    hidden, weight = torch.zeros(1, WIDTH), torch.zeros(2, WIDTH)
    hidden[0, 0], weight[0, 0], weight[1, 1] = gap, 1.0, 1.0
    losses = HeadLoss.apply(hidden.requires_grad_(), weight, torch.tensor([0]), operands, wide)
    by_hidden = gradients(losses, torch.ones(1), hidden)[0][0]
    share = torch.tensor(-gap).sigmoid().item()
    assert by_hidden[1].item() == pytest.approx(share, rel=0.01)
    if gap == 10:
        assert by_hidden[0].item() == pytest.approx(-share, rel=0.01)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(wrong: float) -> None:
    hidden, weight = given(torch.float16)
    with torch.no_grad():
        hidden[1, 0] = wrong
    losses = HeadLoss.apply(hidden, weight, LABELS, torch.float16, True)
    assert not losses[1].isfinite()
    assert losses.isfinite().sum() == ROWS - 1
    hidden, weight = given(torch.float16)
    losses = HeadLoss.apply(hidden, weight, LABELS, torch.float16, True)
    assert not gradients(losses, torch.full((ROWS,), wrong), weight)[0].isfinite().any()


def test_where_nothing_is_gained_the_head_returns_logits() -> None:
    head = Head(GPTConfig(vocab_size=VOCAB, d_model=WIDTH, n_head=2))
    assert head(torch.randn(2, 3, WIDTH), labels=torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, VOCAB)
