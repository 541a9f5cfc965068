"""One Adam step with 8-bit moments in one pass over memory, in Triton, on CUDA.

The update is that of :func:`~.eight_bit_step.step_8_bit`, whose other path dequantizes moments to fp32 in memory and
quantizes them again. Here a program holds a few blocks in registers: weights, gradients and codes come in, weights and
codes go out, 16 bytes an element of fp32 weights, against 28 of a fused Adam whose moments are fp32.

Only this file imports Triton, which CUDA builds of torch bring along, and only a CUDA step imports this file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from .eight_bit_layout import BLOCK

if TYPE_CHECKING:
    from .eight_bit_blocks import Moment, Rows
    from .eight_bit_step import AdamArguments

_BLOCKS, _WARPS = 8, 4  # of one program: 2048 elements, 16 a thread; the fastest of ten on an H200
_LEAST = -1e30  # for the logarithm of zero


# The dynamic map, counted from its zero, has seven decades, 1e-6 to 1, of FIRST, 2 FIRST, 4 FIRST, ... values (FIRST: 1
# signed, 2 unsigned), evenly spaced: value k of n is 0.1 + 0.9 (k + 1/2) / n of the decade's top. The last value is 1.
# So neither way looks anything up.


@triton.jit  # type: ignore[untyped-decorator]
def _nearest(x, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Place of the nearest value to x in [0, 1]."""
    # In a decade of n values it is floor(x slope + n 8/9 + 1 - FIRST), slope = n / (0.9 top), at most 2 n - FIRST.
    n = tl.full(x.shape, FIRST, tl.float32)
    slope = tl.full(x.shape, 1e6 * FIRST / 0.9, tl.float32)
    for decade in tl.static_range(6):
        # Above the middle between the last value of this decade and the first of the next.
        above = x > 10.0 ** (decade - 6) * (1.0 + 0.9 / (FIRST * 2**decade))
        n = tl.where(above, FIRST * 2.0 ** (decade + 1), n)
        slope = tl.where(above, 10.0 ** (5 - decade) * FIRST * 2.0 ** (decade + 1) / 0.9, slope)
    place = tl.minimum(x * slope + (n * (8.0 / 9.0) + (1 - FIRST)), n * 2.0 - FIRST)
    place = tl.where(x > 1.0 - 0.225 / (FIRST * 64), FIRST * 127 + 1.0, place)
    return tl.where(x > 1e-6 * (0.05 + 0.225 / FIRST), place, 0.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _value(place, at_0, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The map's value at a place, up to rounding; ``at_0`` at the place of zero."""
    count = (place + (FIRST - 1)).to(tl.float32)  # n + k, so that its exponent tells the decade
    top = count.to(tl.int32, bitcast=True) & 0x7F800000
    n = top.to(tl.float32, bitcast=True)
    one_over_n = (0x7F000000 - top).to(tl.float32, bitcast=True)
    decade = (top >> 23) - (127 + (FIRST - 1))  # 0 to 6
    power = tl.where((decade & 1) != 0, 10.0, 1.0) * tl.where((decade & 2) != 0, 100.0, 1.0)
    power *= tl.where((decade & 4) != 0, 1e4, 1.0)
    value = (0.1 + 0.9 * (count - n + 0.5) * one_over_n) * (power * 1e-6)
    value = tl.where(place == FIRST * 127 + 1, 1.0, value)
    return tl.where(place == 0, at_0, value)


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    p_ptr, g_ptr, codes1_ptr, codes2_ptr, maxima1_ptr, maxima2_ptr, step_ptr, lr_ptr, found_inf_ptr,
    grad_scale_ptr, lr, beta1, beta2, log_beta1, log_beta2, eps, decay, width, blocks_a_row, blocks,
    WHOLE: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, LR_ON_DEVICE: tl.constexpr,
    FOUND_INF: tl.constexpr, GRAD_SCALE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if FOUND_INF:  # noqa: SIM102 (known when the kernel is compiled; the next line is not)
        if tl.load(found_inf_ptr) == 1.0:
            return
    if LR_ON_DEVICE:
        lr = tl.load(lr_ptr).to(tl.float32)
    step = tl.load(step_ptr)
    bias1 = -libdevice.expm1(step * log_beta1)  # 1 - beta^step, without the cancellation
    root_bias2 = tl.sqrt(-libdevice.expm1(step * log_beta2))
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    held = block < blocks
    column = tl.arange(0, BLOCK)[None, :]
    if WHOLE:  # rows of whole blocks: one block behind the other
        at = block.to(tl.int64)[:, None] * BLOCK + column
        inside = held[:, None] & (column < BLOCK)
    else:
        column = column + (block % blocks_a_row)[:, None] * BLOCK
        at = (block // blocks_a_row).to(tl.int64)[:, None] * width + column
        inside = held[:, None] & (column < width)

    p = tl.load(p_ptr + at, mask=inside, other=0.0)
    weight = p.to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if GRAD_SCALE:
        g = g / tl.load(grad_scale_ptr)
    if MAXIMIZE:
        g = -g
    if DECOUPLED:
        weight -= lr * decay * weight
    else:
        g += decay * weight
    signed = tl.load(codes1_ptr + at, mask=inside, other=0).to(tl.int32) - 127
    m = _value(tl.abs(signed), 0.0, 1) * tl.load(maxima1_ptr + block, mask=held, other=0.0)[:, None]
    m = tl.where(signed < 0, -m, m)
    lost = tl.where(m == 0.0, 0.0, 1e-6 * (0.05 + 0.225 / 2))  # see `dequantize_moments`
    v = _value(tl.load(codes2_ptr + at, mask=inside, other=0).to(tl.int32), lost, 2)
    v *= tl.load(maxima2_ptr + block, mask=held, other=0.0)[:, None]
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    if not WHOLE:
        m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
    weight -= lr / bias1 * m / (tl.sqrt(v) / root_bias2 + eps)

    maxima1, maxima2 = tl.max(tl.abs(m), axis=1), tl.max(v, axis=1)
    x = m * (1.0 / tl.where(maxima1 > 0, maxima1, 1.0))[:, None]  # a block of zeros keeps the code of zero
    place = _nearest(tl.abs(x), 1)
    codes1 = tl.where(x < 0, 127 - tl.minimum(place, 127), 127 + place)  # the map has 1 and no -1
    codes2 = _nearest(v * (1.0 / tl.where(maxima2 > 0, maxima2, 1.0))[:, None], 2)
    tl.store(p_ptr + at, weight.to(p.dtype), mask=inside)
    tl.store(codes1_ptr + at, codes1.to(tl.uint8), mask=inside)
    tl.store(codes2_ptr + at, codes2.to(tl.uint8), mask=inside)
    tl.store(maxima1_ptr + block, maxima1, mask=held)
    tl.store(maxima2_ptr + block, maxima2, mask=held)


def step_in_one_pass(
    p: Tensor, g: Tensor, first: Moment, second: Moment, step: Tensor, rows: Rows, arguments: AdamArguments
) -> None:
    """As :func:`~.eight_bit_step.step_8_bit`: dynamic map, tensors that lie in order, no block cut between ranks."""
    if not p.numel():
        return
    blocks_a_row = -(-rows.width // BLOCK)
    blocks = rows.height * blocks_a_row
    a, lr_on_device = arguments, isinstance(arguments.lr, Tensor)
    # What a kernel does not read is given as any tensor or number at hand.
    _step[(triton.cdiv(blocks, _BLOCKS),)](
        p, g, first.codes, second.codes, first.maxima, second.maxima, step,
        a.lr if lr_on_device else step, step if a.found_inf is None else a.found_inf,
        step if a.grad_scale is None else a.grad_scale, 0.0 if lr_on_device else a.lr, a.beta1, a.beta2,
        _logarithm(a.beta1), _logarithm(a.beta2), a.eps, a.weight_decay, rows.width, blocks_a_row, blocks,
        WHOLE=rows.width % BLOCK == 0, DECOUPLED=a.decoupled, MAXIMIZE=a.maximize, LR_ON_DEVICE=lr_on_device,
        FOUND_INF=a.found_inf is not None, GRAD_SCALE=a.grad_scale is not None, BLOCKS=_BLOCKS, BLOCK=BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip


def _logarithm(beta: float) -> float:
    return math.log(beta) if beta > 0 else _LEAST
