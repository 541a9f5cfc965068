"""Cross-entropy and its gradient, written over the logits, in Triton, on CUDA.

The logits are by far the largest tensor of a step: 3 GiB in bf16 for 32 samples of 1024 tokens and 50304 words.
`CrossEntropy` reads them once forwards, with nothing kept but two numbers a position, and once backwards, where their
gradient takes their place: no fp32 copy, no second tensor of that size. `write_losses_and_gradients`, for `HeadLoss`,
reads them twice forwards, the second time from a cache, and leaves the gradient there and then. Sums are in fp32.

Triton comes with CUDA builds of torch; only a CUDA tensor imports this file.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

# Elements of a tile, and warps: the fastest of about ten on an H200, V 50304.
_FORWARD, _BACKWARD, _WARPS = 4096, 2048, 4
# Of both at once, and programs per multiprocessor, the fastest of 26: they take rows in turn, and are so few that what
# is being read fits into the caches.
_BOTH, _REST, _BOTH_WARPS, _PROGRAMS = 16384, 2048, 8, 6
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _add(x, largest, total):  # type: ignore[no-untyped-def]
    """The largest of all logits seen times log2(e), and the sum of 2^(x log2(e) - largest); a NaN stays in it."""
    higher = tl.maximum(largest, tl.max(x, axis=0) * _LOG2_E)
    return higher, total * tl.exp2(largest - higher) + tl.sum(tl.exp2(x * _LOG2_E - higher), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _losses(logits_ptr, labels_ptr, losses_ptr, log_z_ptr, vocab, IGNORED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        largest, total = _add(x, largest, total)
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
    logits_ptr, labels_ptr, losses_ptr, rows, vocab, padded,
    LOG2_ONE: tl.constexpr, IGNORED: tl.constexpr, TILE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    whole = vocab // TILE * TILE  # what full tiles hold; the rest is left to shorter ones, or much would be masked
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        logits = logits_ptr + row * padded
        label = tl.load(labels_ptr + row)
        # Before the loops, whose reductions all threads wait for: gradients may be written over it.
        known = (label >= 0) & (label < vocab)
        logit = tl.load(logits + label, mask=known, other=float("nan")).to(tl.float32)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        for start in range(0, whole, TILE):
            x = tl.load(logits + start + tl.arange(0, TILE), eviction_policy="evict_last").to(tl.float32)
            largest, total = _add(x, largest, total)
        for start in range(whole, vocab, REST):
            at = start + tl.arange(0, REST)
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            largest, total = _add(x, largest, total)
        log2_z = largest + tl.log2(total)
        tl.store(losses_ptr + row, tl.where(label == IGNORED, 0.0, log2_z * _LN_2 - logit))
        shift = tl.where(label == IGNORED, float("inf"), log2_z - LOG2_ONE)  # 2^(x log2(e) - shift): the softmax
        # Back to front: what was read last is the most likely to be in a cache still.
        for start in range(whole, padded, REST):
            at = start + tl.arange(0, REST)
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
            share = tl.exp2(x * _LOG2_E - shift).to(logits_ptr.dtype.element_ty)
            tl.store(logits + at, share, mask=at < padded, eviction_policy="evict_first")
        for done in range(0, whole, TILE):
            at = whole - TILE - done + tl.arange(0, TILE)
            x = tl.load(logits + at, eviction_policy="evict_first").to(tl.float32)
            share = tl.exp2(x * _LOG2_E - shift).to(logits_ptr.dtype.element_ty)
            tl.store(logits + at, share, eviction_policy="evict_first")
        tl.debug_barrier()  # the label's share is there, from whichever thread
        ONE: tl.constexpr = 2.0**LOG2_ONE
        of_label = tl.exp2(logit * _LOG2_E - shift) - ONE
        tl.store(logits + label, of_label.to(logits_ptr.dtype.element_ty), mask=known & (label != IGNORED))


def write_losses_and_gradients(
    logits: Tensor, vocab: int, labels: Tensor, losses: Tensor, log2_one: int, ignored: int
) -> None:
    """Write the cross-entropies (N,), fp32, and over the logits softmax minus one-hot.

    Args:
        logits: (N, padded V), contiguous; read twice, and overwritten, the padding with 0.
        vocab: V.
        labels: (N,), contiguous; one that is neither ignored nor in the vocabulary makes a NaN of its loss.
        losses: Written; fp32.
        log2_one: Gradients are written 2^log2_one times as large.
        ignored: The label of rows without loss and gradient.
    """
    rows, padded = logits.shape
    programs = _PROGRAMS * torch.cuda.get_device_properties(logits.device).multi_processor_count
    _losses_and_gradients[(min(rows, programs),)](
        logits, labels, losses, rows, vocab, padded,
        LOG2_ONE=log2_one, IGNORED=ignored, TILE=_BOTH, REST=_REST, num_warps=_BOTH_WARPS,
    )  # fmt: skip


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
