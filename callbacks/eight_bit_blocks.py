"""Quantize moments block by block, and back: blocks of 256 elements that never cross a row, wherever a shard is cut.

bitsandbytes' optimizers lay blocks over the flat tensor, so that a shard that holds no multiple of 256 elements has
other blocks, and other numbers, than the whole. Here every row begins a new block. Where a row holds a multiple of 256
elements that is the same; elsewhere its last block is shorter. A shard of whole rows has the whole's blocks exactly.
Where rows themselves are cut (tensor parallelism over the input dimension), the ranks that share a block agree on its
maximum.

A second moment below a bound (1.6e-7 of its block's maximum with the dynamic map, 2e-3 with the linear one) is
quantized to zero. Its gradient is up to the root of that, 4e-4 or 0.04 of the largest, so the first moment of the same
element may be quantized to another value than zero. The next step would divide it by eps alone and move the weight by
thousands of learning rates. :func:`dequantize_moments` therefore reads such a second moment as the bound, the largest
value that is quantized to zero: a step is at most what it would be with fp32 moments. bitsandbytes reads zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .base import MisconfigurationException
from .eight_bit_layout import BLOCK
from .shards import local

StateMap = Literal["dynamic", "linear"]


def require_bitsandbytes() -> None:
    """Import bitsandbytes (slow: here, and not with the package), which registers its operators with torch.

    Raises:
        MisconfigurationException: when it is missing or too old to have them.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise MisconfigurationException(
            "`EightBitAdam`: bitsandbytes is not installed; pip install 'bitsandbytes>=0.46'."
        ) from error
    if not hasattr(torch.ops.bitsandbytes, "quantize_blockwise"):
        raise MisconfigurationException(
            f"`EightBitAdam`: bitsandbytes {bitsandbytes.__version__} registers no operator quantize_blockwise; install"
            " 0.46 or newer."
        )


@cache
def state_maps(name: StateMap, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values that codes stand for, fp32 in [-1, 1]: signed for the first moment, unsigned for the second.

    ``dynamic``: more of them near zero (Dettmers 2016, arXiv:1511.04561). ``linear``: evenly spaced.
    """
    from bitsandbytes.functional import create_dynamic_map, create_linear_map

    make: Callable[..., Tensor] = {"dynamic": create_dynamic_map, "linear": create_linear_map}[name]
    return make(signed=True).to(device), make(signed=False).to(device)


class Rows(NamedTuple):
    """Where this rank's piece of a parameter (n, ...) lies, its dimensions after the first flattened into rows.

    Attributes:
        height: Rows held here.
        first: Column of the whole row at which the piece begins.
        width: Columns held here.
        total: Columns of a whole row.
        group: The ranks that hold the other pieces of the rows, where a cut goes through a block; else ``None``.
    """

    height: int
    first: int
    width: int
    total: int
    group: Any = None

    @property
    def blocks(self) -> tuple[int, int]:
        """First block of the row that the piece touches, and the one after its last."""
        start = self.first // BLOCK
        return start, -(-(self.first + self.width) // BLOCK) if self.width else start

    @property
    def padding(self) -> tuple[int, int]:
        """Elements that are missing on either side for the piece to be whole blocks."""
        start, end = self.blocks
        return (self.first - start * BLOCK, end * BLOCK - self.first - self.width) if self.width else (0, 0)

    @property
    def maxima(self) -> int:
        """Block maxima a row that are kept here: where a block is cut, those of the whole row, on every rank."""
        start, end = self.blocks
        return end - start if self.group is None else -(-self.total // BLOCK)

    def pad(self, piece: Tensor) -> Tensor:
        """(height, width) -> (height, whole blocks), zeros at the sides; the same storage where nothing is missing."""
        return F.pad(piece, self.padding) if any(self.padding) else piece

    def unpad(self, padded: Tensor) -> Tensor:
        """The reverse of :meth:`pad`."""
        return padded.narrow(1, self.padding[0], self.width) if any(self.padding) else padded


def column_cuts(parameter: Tensor) -> list[int]:
    """Mesh dimensions along which rows are cut into pieces."""
    if not isinstance(parameter, DTensor):
        return []
    sharded = [(index, getattr(p, "dim", None)) for index, p in enumerate(parameter.placements)]
    return [index for index, dim in sharded if dim not in (None, 0) and parameter.device_mesh.size(index) > 1]


def rows_of(parameter: Tensor) -> Rows:
    """The rows of a parameter that may be a DTensor of any placement that :func:`refuse_unplaceable` lets pass."""
    height, total = local(parameter).shape[0], math.prod(parameter.shape[1:])
    cuts = column_cuts(parameter)
    if not cuts:
        return Rows(height, 0, total, total)
    assert isinstance(parameter, DTensor)
    mesh, index = parameter.device_mesh, cuts[0]
    piece = -(-total // mesh.size(index))  # torch cuts like `chunk`: equal pieces, and what is left at the end
    first = min(total, mesh.get_local_rank(index) * piece)
    width = min(piece, total - first)
    return Rows(height, first, width, total, mesh.get_group(index) if piece % BLOCK else None)


def refuse_unplaceable(name: str, parameter: Tensor) -> None:
    """Raise where blocks cannot follow the pieces: rows cut twice or in strides, or cut in 3 dimensions and more."""
    cuts = column_cuts(parameter)
    if not cuts:
        return
    assert isinstance(parameter, DTensor)
    if len(cuts) > 1 or parameter.ndim != 2 or type(parameter.placements[cuts[0]]) is not Shard:
        raise MisconfigurationException(
            f"`EightBitAdam`: {name} {tuple(parameter.shape)} is placed as {parameter.placements}, and 8-bit blocks"
            " follow cuts along the first dimension, and one cut along the second of two; name its module in"
            " keep_32_bit."
        )


class Moment(NamedTuple):
    """One moment in 8 bit: codes (height, width) uint8, maxima (height, blocks) fp32, the 256 values of a code."""

    codes: Tensor
    maxima: Tensor
    qmap: Tensor


def quantize(values: Tensor, qmap: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """(height, whole blocks) fp32, zero at the sides -> codes (height, width) uint8, maxima (height, maxima) fp32.

    ``values`` may be changed at the sides. Where a cut goes through a block, a collective over ``rows.group``.
    """
    agreed = None
    if rows.group is not None and rows.height:
        agreed = _agree_on_maxima(values, rows)
    if not values.numel():
        codes = torch.empty(rows.height, rows.width, dtype=torch.uint8, device=values.device)
        maxima = torch.empty(rows.height, rows.maxima, device=values.device)
    else:
        codes, maxima = torch.ops.bitsandbytes.quantize_blockwise(values, qmap, BLOCK)
        if values.device.type == "cpu":
            # bitsandbytes' lookup table for CPUs has no entry for exactly zero: elements that never had a gradient
            # would drift.
            codes.masked_fill_(values.view(codes.shape) == 0, int(torch.searchsorted(qmap, 0.0)))
        codes, maxima = rows.unpad(codes.view(values.shape)), maxima.view(rows.height, -1)
    return codes, maxima if agreed is None else agreed


def dequantize(codes: Tensor, maxima: Tensor, qmap: Tensor, rows: Rows) -> Tensor:
    """Codes (height, width) and maxima (height, maxima) -> (height, whole blocks) fp32, zero at the sides."""
    padded = rows.pad(codes).contiguous()
    if not padded.numel():
        return torch.empty(padded.shape, device=codes.device)
    start, end = rows.blocks
    mine = maxima if rows.group is None else maxima[:, start:end]
    values: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        padded, mine.contiguous().view(-1), qmap, BLOCK, torch.float32
    )
    left, right = rows.padding
    values[:, :left] = 0.0
    values[:, values.shape[1] - right :] = 0.0
    return values


def dequantize_moments(first: Moment, second: Moment, rows: Rows) -> tuple[Tensor, Tensor]:
    """Both moments in fp32, (height, whole blocks), zero at the sides.

    Where the code of the second moment is zero and the first moment is not, the second is the largest value that is
    quantized to zero, see the module's docstring.
    """
    exp_avg = dequantize(*first, rows)
    bounds = second.qmap.clone()
    bounds[0] = bounds[1] / 2  # the map of second moments is unsigned: code 0 stands for zero
    exp_avg_sq = dequantize(second.codes, second.maxima, bounds, rows)
    exp_avg_sq.masked_fill_((exp_avg == 0) & (rows.pad(second.codes) == 0), 0.0)
    return exp_avg, exp_avg_sq


def _agree_on_maxima(values: Tensor, rows: Rows) -> Tensor:
    """The maxima of whole blocks, (height, maxima); the sides are filled with them, so that they scale the codes."""
    start, end = rows.blocks
    maxima = torch.zeros(rows.height, rows.maxima, device=values.device)
    if rows.width:
        maxima[:, start:end] = values.view(rows.height, -1, BLOCK).abs().amax(dim=2)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=rows.group)
    left, right = rows.padding
    if left:
        values[:, :left] = maxima[:, start : start + 1]
    if right:
        values[:, values.shape[1] - right :] = maxima[:, end - 1 : end]
    return maxima
