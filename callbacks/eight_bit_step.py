"""One Adam step on this rank's own pieces of parameters, without waiting for the device.

The arithmetic is that of torch's fused kernel, in fp32: a step that ``found_inf`` skips touches nothing, gradients are
divided by ``grad_scale``, and both are read on the device. Moments in 8 bit are dequantized for the kernel by
bitsandbytes' registered operators and quantized after it, one parameter at a time; on CUDA, where :func:`has_one_pass`
says so, a kernel of ours does the three at once. (bitsandbytes' own step takes rate, count and scale as numbers of the
host and knows no skip: a step that the device decides to leave out could not be exact.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from .eight_bit_blocks import Moment, Rows, StateMap, dequantize_moments, quantize
from .private_optimizer_names import fused_adam

MOST_ELEMENTS = 1 << 24  # of a parameter whose two moments are in fp32 at one time: 128 MiB


@dataclass(frozen=True)
class AdamArguments:
    """What all parameters of a group share in one step.

    Attributes:
        decoupled: Weights decay by ``lr * weight_decay`` (AdamW), else the decay is added to the gradient (Adam).
        grad_scale: 0-d fp32 on the device; gradients are divided by it. ``None``: by nothing.
        found_inf: 0-d fp32 on the device; 1.0 leaves everything as it is. ``None``: the step is taken.
        state_map: What codes stand for.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    decoupled: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None
    state_map: StateMap = "dynamic"


class Piece(NamedTuple):
    """This rank's piece of a parameter with fp32 moments; as the arguments of :func:`step_8_bit`."""

    p: Tensor
    g: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


def step_8_bit(
    p: Tensor, g: Tensor, first: Moment, second: Moment, step: Tensor, rows: Rows, arguments: AdamArguments
) -> None:
    """Update a parameter and its two moments in place.

    Args:
        p: This rank's piece, fp32, bf16 or fp16.
        g: Its gradient, of the same shape; may be left divided by ``grad_scale``.
        first: Moment of the gradient.
        second: Moment of its square.
        step: 0-d fp32 on the device: the number of this step, from 1.
        rows: How the piece lies in the whole parameter; ``p`` has ``rows.height`` times ``rows.width`` elements.
        arguments: Of the group.
    """
    if has_one_pass(p, g, first, second, rows, arguments):
        from .eight_bit_kernel import step_in_one_pass  # Triton: only where it is used

        step_in_one_pass(p, g, first, second, step, rows, arguments)
        return
    held = p.reshape(rows.height, rows.width)
    gradient = g.reshape(rows.height, rows.width)
    for chunk in _chunks(rows):
        piece = rows._replace(height=chunk.stop - chunk.start)
        moments = [m._replace(codes=m.codes[chunk], maxima=m.maxima[chunk]) for m in (first, second)]
        _step_rows(held[chunk], gradient[chunk], moments, step, piece, arguments)
    _write_back(p, held)


def has_one_pass(p: Tensor, g: Tensor, first: Moment, second: Moment, rows: Rows, arguments: AdamArguments) -> bool:
    """Whether the kernel that steps in one pass knows this case; what it needs is the same on all ranks."""
    known = p.is_cuda and arguments.state_map == "dynamic" and rows.group is None and _has_triton()
    return known and all(t.is_contiguous() for t in (p, g, *first, *second))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _chunks(rows: Rows) -> list[slice]:
    """The rows in parts, so that no more than these are ever held in fp32; equal on all ranks that share blocks."""
    size = max(1, MOST_ELEMENTS // max(1, rows.total))
    return [slice(start, min(start + size, rows.height)) for start in range(0, rows.height, size)]


def _step_rows(
    p: Tensor, g: Tensor, moments: Sequence[Moment], step: Tensor, rows: Rows, arguments: AdamArguments
) -> None:
    first, second = moments
    exp_avg, exp_avg_sq = dequantize_moments(first, second, rows)
    # With the sides that complete a block, so that a piece and the whole meet the same vector instructions.
    wide, gradient = rows.pad(_fp32(p)), rows.pad(_fp32(g))
    if exp_avg.numel():
        _adam([wide], [gradient], [exp_avg], [exp_avg_sq], [step], arguments)
        _write_back(p, rows.unpad(wide))
    skipped = None if arguments.found_inf is None else arguments.found_inf == 1
    for moment, values in zip(moments, (exp_avg, exp_avg_sq), strict=True):
        codes, maxima = quantize(values, moment.qmap, rows)
        _replace(moment.codes, codes, skipped)
        _replace(moment.maxima, maxima, skipped)


def step_32_bit(pieces: Sequence[Piece], arguments: AdamArguments) -> None:
    """Update parameters whose moments are fp32, in place and all in one kernel."""
    held = [piece for piece in pieces if piece.p.numel()]
    if not held:
        return
    wide = [_fp32(piece.p) for piece in held]
    _adam(
        wide,
        [_fp32(piece.g) for piece in held],
        [piece.exp_avg for piece in held],
        [piece.exp_avg_sq for piece in held],
        [piece.step for piece in held],
        arguments,
    )
    for piece, values in zip(held, wide, strict=True):
        _write_back(piece.p, values)


def _adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    arguments: AdamArguments,
) -> None:
    fused_adam(arguments.decoupled)(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=arguments.lr,
        beta1=arguments.beta1,
        beta2=arguments.beta2,
        weight_decay=arguments.weight_decay,
        eps=arguments.eps,
        amsgrad=False,
        maximize=arguments.maximize,
        grad_scale=arguments.grad_scale,
        found_inf=arguments.found_inf,
    )


def _fp32(tensor: Tensor) -> Tensor:
    """The tensor itself where it is fp32 and laid out in order, else a copy that is."""
    return tensor.detach().to(torch.float32).contiguous()


def _write_back(parameter: Tensor, values: Tensor) -> None:
    if values.data_ptr() != parameter.data_ptr():  # a copy was stepped on: 16 bit, another layout, or padded rows
        parameter.copy_(values.reshape(parameter.shape))


def _replace(kept: Tensor, new: Tensor, skipped: Tensor | None) -> None:
    if skipped is None:
        kept.copy_(new)
    else:
        torch.where(skipped, kept, new, out=kept)
