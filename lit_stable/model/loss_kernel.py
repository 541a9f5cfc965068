"""Cross-entropy and its gradient, written over the logits or apart from them, in Triton, on CUDA.

The logits are by far the largest tensor of a step: 3 GiB in bf16 for 32 samples of 1024 tokens and 50304 words.
`CrossEntropy` reads them once forwards, with nothing kept but two numbers a position, and once backwards, where their
gradient takes their place: no fp32 copy, no second tensor of that size. `write_losses_and_gradients`, for `HeadLoss`,
reads them twice forwards and leaves the gradient there and then. Sums are in fp32.

Only this file of the model imports Triton, which CUDA builds of torch bring along, and only a CUDA tensor imports it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

_FORWARD, _BACKWARD = 4096, 2048  # elements of a tile: the fastest of about ten on an H200, V 50304
_WARPS = 4
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def _losses(logits_ptr, labels_ptr, losses_ptr, log_z_ptr, vocab, IGNORED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)  # sum of 2^(x - largest); a NaN stays in it
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * _LOG2_E
        higher = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(x - higher), axis=0)
        largest = higher
    log_z = (largest + tl.log2(total)) * _LN_2
    label = tl.load(labels_ptr + row)
    known = (label >= 0) & (label < vocab)
    logit = tl.load(logits_ptr + label, mask=known, other=float("nan")).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(label == IGNORED, 0.0, log_z - logit))
    tl.store(log_z_ptr + row, log_z)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits_ptr, labels_ptr, log_z_ptr, by_loss_ptr, by_log_z_ptr, vocab, IGNORED: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    logits_ptr += row * vocab + at
    label = tl.load(labels_ptr + row)
    by_loss = tl.where(label == IGNORED, 0.0, tl.load(by_loss_ptr + row))
    by_either = by_loss + tl.load(by_log_z_ptr + row)
    logits = tl.load(logits_ptr, mask=at < vocab, other=0.0)
    share = tl.exp2((logits.to(tl.float32) - tl.load(log_z_ptr + row)) * _LOG2_E)  # the softmax
    gradient = share * by_either - tl.where(at == label, by_loss, 0.0)
    tl.store(logits_ptr, gradient.to(logits.dtype), mask=at < vocab)


@triton.jit  # type: ignore[untyped-decorator]
def _losses_and_gradients(  # type: ignore[no-untyped-def]
    logits_ptr, labels_ptr, losses_ptr, out_ptr, vocab, ONE: tl.constexpr, IGNORED: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    out_ptr += row * vocab
    label = tl.load(labels_ptr + row)
    # Before the loop, whose reductions all threads wait for: the second loop may write over it.
    known = (label >= 0) & (label < vocab)
    logit = tl.load(logits_ptr + label, mask=known, other=float("nan")).to(tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * _LOG2_E
        higher = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(x - higher), axis=0)
        largest = higher
    log2_z = largest + tl.log2(total)
    tl.store(losses_ptr + row, tl.where(label == IGNORED, 0.0, log2_z * _LN_2 - logit))
    counted = tl.where(label == IGNORED, 0.0, ONE)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + at, mask=at < vocab, other=0.0).to(tl.float32) * _LOG2_E
        gradient = (tl.exp2(x - log2_z) - tl.where(at == label, 1.0, 0.0)) * counted
        tl.store(out_ptr + at, gradient.to(out_ptr.dtype.element_ty), mask=at < vocab)


def write_losses_and_gradients(
    logits: Tensor, labels: Tensor, losses: Tensor, gradients: Tensor, one: float, ignored: int
) -> None:
    """Of logits (N, V) and labels (N,) write the cross-entropies (N,), fp32, and ``one`` (softmax - one-hot), (N, V).

    Args:
        logits: Contiguous. Each row is read twice.
        labels: Contiguous; one that is neither ignored nor in the vocabulary makes a NaN of its loss.
        losses: Written; fp32.
        gradients: Written, in its dtype; may be the logits.
        one: What 1 is written as.
        ignored: The label of rows without loss and gradient.
    """
    rows, vocab = logits.shape
    _losses_and_gradients[(rows,)](
        logits, labels, losses, gradients, vocab, ONE=one, IGNORED=ignored, TILE=_FORWARD, num_warps=_WARPS
    )


class CrossEntropy(torch.autograd.Function):
    """Of logits (N, V) and labels (N,) the cross-entropies and log(Z), (N,) each, fp32.

    The backward pass overwrites the logits: whoever saved them for a backward pass of his own gets autograd's error.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        losses, log_z = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(2))
        _losses[(rows,)](logits, labels, losses, log_z, vocab, IGNORED=ignored, TILE=_FORWARD, num_warps=_WARPS)
        ctx.save_for_backward(logits, labels, log_z)
        ctx.ignored = ignored
        return losses, log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, log_z = ctx.saved_tensors
        by_loss, by_log_z = (gradient.contiguous() for gradient in gradients)
        rows, vocab = logits.shape
        _gradient[(rows, triton.cdiv(vocab, _BACKWARD))](
            logits, labels, log_z, by_loss, by_log_z, vocab,
            IGNORED=ctx.ignored, TILE=_BACKWARD, num_warps=_WARPS,
        )  # fmt: skip
        increment_version(logits)
        return logits, None, None
