"""Cross-entropy and its gradient from the head's operands, in Triton, on CUDA: fp32 logits that are never written.

Written, they would be twice as long as their gradient in 16 bits, and written and read once each. Here the product
leaves of each logit x 2^(x log2(e) - m) in 16 bits, where m is the largest x log2(e) of its row within a tile, and in
fp32 of every row and tile m and the sum of these powers. Then the powers are scaled to the softmax in place. They have
been rounded twice then, a loss never.

The labels' logits are of a small product of tiles along a diagonal. Tensor cores cut what they add, so that a sum made
otherwise would be off by more than what is left of 1 - p where a label is nearly certain; and to pick them out of the
large product would make it 1.1 ms longer (H200, D 768), with more numbers to hold than it has registers.

Triton comes with CUDA builds of torch; only a CUDA tensor imports this file.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# N rows, V words, D columns of the operands

# Rows, words and columns of a tile, warps and stages. By tensor descriptors the memory accelerator feeds programs, one
# per multiprocessor, that take tile after tile: the fastest of ten on an H200 at D 768 and 2048. By pointers a program
# takes one smaller tile: the fastest there too, for devices of less shared memory, on none of which it was timed.
_BY_DESCRIPTORS, _BY_POINTERS = (128, 256, 64, 8, 3), (128, 128, 64, 4, 3)
_SHARED_FOR_DESCRIPTORS = 227 * 1024  # bytes for a program: what Hopper and Blackwell of data centres have
_LABEL_ROWS = 64  # of the product for labels
_GROUP = 8  # tiles of rows that go over the words together, so that what they read of the weight is in a cache
_TILE, _WARPS, _PROGRAMS = 4096, 8, 6  # of the softmax: elements, warps, programs per multiprocessor
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(h_ptr, row, w_ptr, word, logits, depth, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """To logits (rows, words) add the products of these rows of h and words of w."""
    h_rows = h_ptr + row.to(tl.int64)[:, None] * depth
    w_rows = w_ptr + word.to(tl.int64)[:, None] * depth
    for start in range(0, depth, DEPTH):
        at = start + tl.arange(0, DEPTH)[None, :]
        a = tl.load(h_rows + at, mask=at < depth, other=0.0)
        b = tl.load(w_rows + at, mask=at < depth, other=0.0)
        logits = tl.dot(a, b.T, logits)
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _head_product(  # type: ignore[no-untyped-def]
    h, w, powers_ptr, largest_ptr, totals_ptr, rows, vocab, padded, depth,
    BY_DESCRIPTORS: tl.constexpr, LOG2_ONE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles, word_tiles = tl.cdiv(rows, ROWS), tl.cdiv(vocab, WORDS)
    for tile in tl.range(tl.program_id(0), row_tiles * word_tiles, tl.num_programs(0), flatten=BY_DESCRIPTORS):
        first = tile // (GROUP * word_tiles) * GROUP
        size = tl.minimum(row_tiles - first, GROUP)
        within = tile % (GROUP * word_tiles)
        row_tile, word_tile = first + within % size, within // size
        row, word = row_tile * ROWS + tl.arange(0, ROWS), word_tile * WORDS + tl.arange(0, WORDS)
        logits = tl.zeros((ROWS, WORDS), tl.float32)
        if BY_DESCRIPTORS:
            for start in range(0, depth, DEPTH):
                logits = tl.dot(h.load([row_tile * ROWS, start]), w.load([word_tile * WORDS, start]).T, logits)
        else:  # behind the last row and word it begins again; what comes of it is not stored
            logits = _add_product(h, row % rows, w, word % vocab, logits, depth, DEPTH)
        x = tl.where((word < vocab)[None, :], logits * _LOG2_E, float("-inf"))
        largest = tl.max(x, axis=1)
        powers = tl.exp2(x - (largest - LOG2_ONE)[:, None])
        tl.store(largest_ptr + word_tile * rows + row, largest, mask=row < rows)
        tl.store(totals_ptr + word_tile * rows + row, tl.sum(powers, axis=1), mask=row < rows)
        # Up to the padded end: where an odd vocabulary ends, each element would be stored by itself.
        there = (row < rows)[:, None] & (word < padded)[None, :]
        powers_ptrs = powers_ptr + row.to(tl.int64)[:, None] * padded + word[None, :]
        tl.store(powers_ptrs, powers.to(powers_ptr.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _label_logits(  # type: ignore[no-untyped-def]
    h_ptr, w_ptr, labels_ptr, logits_ptr, rows, vocab, depth, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels_ptr + row, mask=row < rows, other=-1)
    known = (label >= 0) & (label < vocab)
    logits = tl.zeros((ROWS, ROWS), tl.float32)  # of all labels for all rows; the diagonal is wanted
    logits = _add_product(h_ptr, row % rows, w_ptr, tl.where(known, label, 0), logits, depth, DEPTH)
    own = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
    logit = tl.sum(tl.where(own, logits, 0.0), axis=1) * _LOG2_E
    tl.store(logits_ptr + row, tl.where(known, logit, float("nan")), mask=row < rows)


@triton.jit  # type: ignore[untyped-decorator]
def _head_softmax(  # type: ignore[no-untyped-def]
    logits_ptr, labels_ptr, losses_ptr, powers_ptr, largest_ptr, totals_ptr, rows, vocab, padded,
    LOG2_ONE: tl.constexpr, IGNORED: tl.constexpr,
    WORDS: tl.constexpr, TILES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    word_tiles = tl.cdiv(vocab, WORDS)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        tile = tl.arange(0, TILES)
        largest = tl.load(largest_ptr + tile * rows + row, mask=tile < word_tiles, other=float("-inf"))
        totals = tl.load(totals_ptr + tile * rows + row, mask=tile < word_tiles, other=0.0)
        highest = tl.max(largest, axis=0)
        log2_sum = tl.log2(tl.sum(totals * tl.exp2(largest - highest), axis=0) * 2.0**-LOG2_ONE)
        label = tl.load(labels_ptr + row)
        known = (label >= 0) & (label < vocab)
        logit = tl.load(logits_ptr + row) - highest
        tl.store(losses_ptr + row, tl.where(label == IGNORED, 0.0, (log2_sum - logit) * _LN_2))
        log2_z = highest + log2_sum
        shift = tl.where(label == IGNORED, float("inf"), log2_z)
        powers_ptrs = powers_ptr + row * padded
        for start in range(0, word_tiles, AT_ONCE):
            some = start + tl.arange(0, AT_ONCE)
            shift_of = tl.load(largest_ptr + some * rows + row, mask=some < word_tiles, other=float("-inf")) - shift
            word = some[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            powers = tl.load(powers_ptrs + word, mask=word < padded, other=0.0, eviction_policy="evict_first")
            share = (powers.to(tl.float32) * tl.exp2(shift_of)[:, None]).to(powers_ptr.dtype.element_ty)
            tl.store(powers_ptrs + word, share, mask=word < padded, eviction_policy="evict_first")
        tl.debug_barrier()  # the label's share is there, from whichever thread
        of_label = (tl.exp2(logit - log2_sum) - 1) * 2.0**LOG2_ONE
        tl.store(powers_ptrs + label, of_label.to(powers_ptr.dtype.element_ty), mask=known & (label != IGNORED))


def write_losses_and_gradients_of_product(
    h: Tensor, w: Tensor, vocab: int, labels: Tensor, losses: Tensor, gradients: Tensor, log2_one: int, ignored: int
) -> None:
    """Of logits h w^T write the cross-entropies (N,), fp32, and softmax minus one-hot.

    Args:
        h: (N, D) in 16 bits, contiguous.
        w: (padded V, D) in the same dtype, contiguous; padded V is V rounded up to a multiple of 64, of which tiles are
            multiples: what lies behind the last tile would not be written.
        vocab: V.
        labels: (N,), contiguous; one that is neither ignored nor in the vocabulary makes a NaN of its loss.
        losses: Written; fp32.
        gradients: (N, padded V), contiguous; written, in its dtype, the padding with 0.
        log2_one: Gradients are written 2^log2_one times as large.
        ignored: The label of rows without loss and gradient.
    """
    (rows, depth), padded = h.shape, len(w)
    device = torch.cuda.get_device_properties(h.device)
    aligned = all(t.stride(0) * t.element_size() % 16 == t.data_ptr() % 16 == 0 for t in (h, w))
    shared = getattr(device, "shared_memory_per_block_optin", 0)  # torch for AMD has no such number
    described = aligned and shared >= _SHARED_FOR_DESCRIPTORS
    tile_rows, words, tile_depth, warps, stages = _BY_DESCRIPTORS if described else _BY_POINTERS
    word_tiles = triton.cdiv(vocab, words)
    largest, totals = torch.empty(2, word_tiles, rows, dtype=torch.float32, device=h.device)  # largest: times log2(e)
    of_label = torch.empty_like(losses)  # (N,), its logit times log2(e)
    tiles = triton.cdiv(rows, tile_rows) * word_tiles
    operands = (h, w)
    if described:
        operands = tuple(TensorDescriptor.from_tensor(t, [n, tile_depth]) for t, n in ((h, tile_rows), (w, words)))
    _head_product[(min(tiles, device.multi_processor_count) if described else tiles,)](
        *operands, gradients, largest, totals, rows, vocab, padded, depth,
        BY_DESCRIPTORS=described, LOG2_ONE=log2_one, ROWS=tile_rows, WORDS=words, DEPTH=tile_depth, GROUP=_GROUP,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _label_logits[(triton.cdiv(rows, _LABEL_ROWS),)](
        h, w, labels, of_label, rows, vocab, depth, ROWS=_LABEL_ROWS, DEPTH=tile_depth, num_warps=4
    )
    _head_softmax[(min(rows, _PROGRAMS * device.multi_processor_count),)](
        of_label, labels, losses, gradients, largest, totals, rows, vocab, padded,
        LOG2_ONE=log2_one, IGNORED=ignored, WORDS=words, TILES=triton.next_power_of_2(word_tiles),
        AT_ONCE=_TILE // words, num_warps=_WARPS,
    )  # fmt: skip
