"""The kernel of the cross-entropy against fp64, and what it promises about memory and about who keeps the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lit_stable.callbacks.ignored_label import IGNORED
from lit_stable.model.config import GPTConfig
from lit_stable.model.head import Head
from lit_stable.model.head_loss import HeadLoss
from lit_stable.model.loss import position_losses, sample_losses, sample_losses_with_z

pytestmark = pytest.mark.gpu
ROWS = 1700  # more than programs are begun, 6 per multiprocessor: each takes several


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


@pytest.mark.parametrize(
    ("operands", "wide"), [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)], ids=str
)
@pytest.mark.parametrize("vocab", [2, 1000, 16383, 50304])
@pytest.mark.parametrize("width", [20, 64, 200])  # rows of 20 are no whole number of 16 bytes: loaded by pointers
def test_head_and_loss_in_one_node_are_those_of_fp64(width: int, vocab: int, operands: torch.dtype, wide: bool) -> None:
    torch.manual_seed(0)
    eight = (64 / width) ** 0.25  # so that logits have a standard deviation of 8
    hidden, weight = ((eight * torch.randn(n, width, device="cuda")).to(operands).float() for n in (ROWS, vocab))
    labels = torch.randint(vocab, (ROWS,), device="cuda")
    labels[::7] = IGNORED
    given = [t.clone().requires_grad_() for t in (hidden, weight)]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    losses = HeadLoss.apply(*given, labels, operands, wide)  # type: ignore[no-untyped-call]
    expected = F.cross_entropy(exact[0] @ exact[1].T, labels, ignore_index=IGNORED, reduction="none")
    coarse = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[operands]  # narrow logits, up to 40, are rounded too
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=1e-4 if wide else 64 * coarse)
    weights = torch.rand(ROWS, device="cuda") / ROWS
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    for ours, theirs in zip(given, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= (2 if wide else 8) * coarse * theirs.grad.norm()


def test_an_fp32_head_is_the_same_where_tiles_are_loaded_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_stable.model import head_kernel

    def found() -> list[torch.Tensor]:
        torch.manual_seed(0)
        hidden, weight = (torch.randn(n, 64, device="cuda", requires_grad=True) for n in (ROWS, 5000))
        losses = HeadLoss.apply(hidden, weight, torch.arange(ROWS, device="cuda"), torch.float16, True)  # type: ignore[no-untyped-call]
        return [losses, *torch.autograd.grad(losses.mean(), (hidden, weight))]

    by_descriptors = found()
    monkeypatch.setattr(head_kernel, "_SHARED_FOR_DESCRIPTORS", 2**30)  # no device has as much
    for ours, theirs in zip(found(), by_descriptors, strict=True):
        assert (ours - theirs).norm() <= 2**-11 * theirs.norm()


@pytest.mark.parametrize(("operands", "wide"), [(torch.bfloat16, False), (torch.float16, True)], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_head_and_loss_in_one_node_show_what_is_no_number(wrong: float, operands: torch.dtype, wide: bool) -> None:
    hidden, weight = (torch.randn(n, 64, device="cuda") for n in (ROWS, 1000))  # padded to 1024 words
    hidden[3, 5] = wrong
    labels = torch.zeros(ROWS, dtype=torch.long, device="cuda")
    labels[5], labels[6], labels[7] = 1000, 1023, -5  # none is in the vocabulary
    losses = HeadLoss.apply(hidden, weight, labels, operands, wide)  # type: ignore[no-untyped-call]
    assert (~losses.isfinite()).nonzero().flatten().tolist() == [3, 5, 6, 7]


def test_logits_of_an_fp32_head_may_be_of_any_size() -> None:
    hidden, weight = torch.full((2, 64), 300.0, device="cuda"), torch.zeros(600, 64, device="cuda")
    weight[1], weight[400], weight[401] = 3.0, 3.0, -3.0  # logits of +-57600, and of 0
    given = [t.requires_grad_() for t in (hidden, weight)]
    losses = HeadLoss.apply(*given, torch.tensor([400, 401], device="cuda"), torch.float16, True)  # type: ignore[no-untyped-call]
    assert losses.tolist() == pytest.approx([math.log(2), 2 * 57600.0 + math.log(2)], rel=1e-6)
    by_hidden = torch.autograd.grad(losses.sum(), hidden)[0]
    assert by_hidden[0].tolist() == pytest.approx([0.0] * 64, abs=1e-2)  # half of each, minus the label's
    assert by_hidden[1].tolist() == pytest.approx([6.0] * 64, rel=1e-3)


@pytest.mark.parametrize("width", [64, 2048])
def test_what_is_nearly_certain_keeps_its_gradient_and_no_loss_is_negative(width: int) -> None:
    from lit_stable.model.head_kernel import write_losses_and_gradients_of_product

    torch.manual_seed(0)
    hidden, weight = torch.randn(128, width, device="cuda"), 2 * torch.randn(1024, width, device="cuda") / width**0.5
    hidden[:, 0], weight[:, 0] = 8.0, 2.5  # all logits are near 20, of standard deviation 2
    labels = torch.arange(128, device="cuda")
    size = hidden[:, 1:].square().sum(1, keepdim=True)
    weight[:128, 1:] = hidden[:, 1:] * torch.linspace(14, 40, 128, device="cuda")[:, None] / size
    hidden, weight = hidden.half(), weight.half()
    exact = (hidden.double() @ weight.double().T).softmax(-1)
    exact[labels, labels] = 0
    losses, gradients = torch.empty(128, device="cuda"), torch.empty(128, 1024, device="cuda", dtype=torch.float16)
    write_losses_and_gradients_of_product(hidden, weight, 1024, labels, losses, gradients, 15, IGNORED)
    uncertain = exact.sum(1)  # 1 - p
    assert uncertain.min() < 1e-12
    assert uncertain.max() > 1e-3
    assert (losses >= 0).all()
    found = -gradients[labels, labels].double() / 2**15
    assert ((found - uncertain).abs() <= 1e-2 * uncertain + 1e-6).all()
    assert ((losses + (-uncertain).log1p()).abs() <= 1e-2 * uncertain + 1e-6).all()


def test_an_fp32_head_in_training_is_the_fp32_head_of_validation() -> None:
    head = Head(GPTConfig(vocab_size=5000, d_model=256, n_head=2, head_fp32=True)).cuda()
    hidden, labels = torch.randn(3, 7, 256, device="cuda"), torch.arange(21, device="cuda").view(3, 7)
    with torch.autocast("cuda", torch.bfloat16):
        losses = head(hidden, labels=labels)
        with torch.no_grad():
            logits = head(hidden, labels=labels)
    assert (losses.shape, logits.shape, logits.dtype) == ((3, 7), (3, 7, 5000), torch.float32)
    torch.testing.assert_close(losses, position_losses(logits, labels)[0], rtol=0, atol=2e-3)  # 11 bits against 24


@pytest.mark.parametrize("head_fp32", [False, True])
def test_head_and_loss_are_one_where_a_wrapper_rounds_instead_of_autocast(head_fp32: bool) -> None:
    head = Head(GPTConfig(vocab_size=50, d_model=16, n_head=2, head_fp32=head_fp32)).cuda()
    hidden, labels = torch.randn(1, 4, 16, device="cuda"), torch.arange(4, device="cuda")[None]
    assert head(hidden, labels=labels).ndim == 3  # all in fp32: as it was written
    if not head_fp32:
        head = head.bfloat16()  # as FSDP2 does, which leaves an fp32 head's weights alone
    assert head(hidden.bfloat16(), labels=labels).shape == (1, 4)


def test_an_fp32_head_stays_apart_from_its_loss_where_triton_makes_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(GPTConfig(vocab_size=50, d_model=16, n_head=2, head_fp32=True)).cuda()
    hidden, labels = torch.randn(1, 4, 16, device="cuda"), torch.arange(4, device="cuda")[None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with torch.autocast("cuda", torch.float16):
        assert head(hidden, labels=labels).shape == (1, 4, 50)


def test_an_fp32_head_keeps_16_bits_of_its_logits() -> None:
    hidden, weight = (torch.randn(n, 64, device="cuda", requires_grad=True) for n in (2**15, 50304))
    labels = torch.zeros(2**15, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    HeadLoss.apply(hidden, weight, labels, torch.float16, True).mean().backward()  # type: ignore[no-untyped-call]
    small = 8 * (hidden.numel() + weight.numel())
    assert torch.cuda.max_memory_allocated() - before < 2.07 * len(hidden) * len(weight) + small  # and sums of tiles


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
