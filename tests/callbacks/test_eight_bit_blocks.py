"""Blocks of 256 elements that end with each row, whole and cut. Pieces on several ranks: tests/distributed."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_blocks import (
    Moment,
    Rows,
    dequantize,
    dequantize_moments,
    quantize,
    require_bitsandbytes,
    rows_of,
    state_maps,
)

CPU = torch.device("cpu")
require_bitsandbytes()


def nearest(values: torch.Tensor, qmap: torch.Tensor) -> torch.Tensor:
    """The value that the nearest code stands for, block by block: what quantizing means, written out."""
    rows = []
    for row in values:
        for block in row.split(256):
            scaled = block / block.abs().max()
            rows.append(qmap[(scaled[:, None] - qmap).abs().argmin(1)] * block.abs().max())
    return torch.cat(rows).view(values.shape)


@pytest.mark.parametrize("name", ["dynamic", "linear"])
@pytest.mark.parametrize("width", [512, 600, 256, 97, 1])
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_a_value_becomes_the_nearest_of_its_rows_block(name: str, width: int, signed: bool) -> None:
    qmap = state_maps(name, CPU)[0 if signed else 1]  # type: ignore[arg-type]
    values = torch.randn(7, width) if signed else torch.rand(7, width)
    rows = rows_of(values)
    codes, maxima = quantize(rows.pad(values).clone(), qmap, rows)
    assert (codes.shape, codes.dtype) == (values.shape, torch.uint8)
    assert maxima.shape == (7, -(-width // 256))
    back = rows.unpad(dequantize(codes, maxima, qmap, rows))
    # bitsandbytes finds codes by a table of 2^15 steps: next to a boundary it may take the second nearest.
    slack = 2.0**-15 * maxima.repeat_interleave(256, dim=1)[:, :width]
    assert ((back - values).abs() <= (nearest(values, qmap) - values).abs() + slack).all()


def test_rows_of_whole_blocks_have_the_blocks_of_the_flat_tensor() -> None:
    values, qmap = torch.randn(5, 512), state_maps("dynamic", CPU)[0]
    codes, maxima = quantize(values.clone(), qmap, rows_of(values))
    flat_codes, flat_maxima = torch.ops.bitsandbytes.quantize_blockwise(values.view(-1), qmap, 256)
    assert torch.equal(codes.view(-1), flat_codes.view(-1))
    assert torch.equal(maxima.view(-1), flat_maxima.view(-1))


def test_some_of_the_rows_are_quantized_as_among_all() -> None:
    values, (qmap, _) = torch.randn(9, 300), state_maps("dynamic", CPU)
    rows = rows_of(values)
    codes, maxima = quantize(rows.pad(values).clone(), qmap, rows)
    part = values[3:5]
    piece = rows_of(part)
    own_codes, own_maxima = quantize(piece.pad(part).clone(), qmap, piece)
    assert torch.equal(own_codes, codes[3:5])
    assert torch.equal(own_maxima, maxima[3:5])


def test_sides_are_zero_after_widening_whatever_their_code_stands_for() -> None:
    rows = Rows(2, 300, 100, 600)  # 300 to 400 of 600: the second block from 44 on, no cut that needs a group
    codes, maxima = torch.zeros(2, 100, dtype=torch.uint8), torch.ones(2, 1)
    values = dequantize(codes, maxima, state_maps("dynamic", CPU)[0], rows)
    assert values.shape == (2, 256)
    assert rows.padding == (44, 112)
    assert not values[:, :44].any()
    assert not values[:, 144:].any()
    assert (rows.unpad(values) < -0.9).all()  # code 0 is the lowest value


def test_zeros_stay_zeros() -> None:
    for qmap in state_maps("dynamic", CPU):
        rows = Rows(2, 0, 300, 300)
        codes, maxima = quantize(torch.zeros(2, 512), qmap, rows)
        assert not dequantize(codes, maxima, qmap, rows).any()
        assert not maxima.any()


@pytest.mark.parametrize("name", ["dynamic", "linear"])
def test_zeros_among_others_stay_zeros(name: str) -> None:
    """An element that no gradient ever met: on a CPU bitsandbytes gives it 2e-5 of its block's maximum."""
    for qmap in state_maps(name, CPU):  # type: ignore[arg-type]
        values = torch.tensor([[1.0, 0.0, 0.5, -0.0]])
        back = dequantize(*quantize(rows_of(values).pad(values), qmap, rows_of(values)), qmap, rows_of(values))
        assert back[0].count_nonzero() == 2


@pytest.mark.parametrize(("name", "bound"), [("dynamic", 1.625e-7), ("linear", 0.5 / 255)])
def test_a_second_moment_that_was_lost_beside_a_first_is_the_largest_that_could_be(name: str, bound: float) -> None:
    """Codes by hand: both known, the second one lost, neither ever met."""
    signed, unsigned = state_maps(name, CPU)  # type: ignore[arg-type]
    first = Moment(torch.tensor([[255, 131, 127]], dtype=torch.uint8), torch.tensor([[3.0]]), signed)
    second = Moment(torch.tensor([[255, 0, 0]], dtype=torch.uint8), torch.tensor([[2.0]]), unsigned)
    exp_avg, exp_avg_sq = dequantize_moments(first, second, Rows(1, 0, 3, 3))
    assert torch.equal(exp_avg[0, :3], 3 * signed[[255, 131, 127]])
    torch.testing.assert_close(exp_avg_sq[0, :3], torch.tensor([2.0, 2 * bound, 0.0]), rtol=1e-6, atol=0)
    assert not exp_avg_sq[:, 3:].any()
    assert unsigned[0] == 0, "the map itself stays"


@pytest.mark.parametrize("rows", [Rows(0, 0, 300, 300), Rows(3, 300, 0, 300)], ids=["no rows", "no columns"])
def test_a_rank_without_a_piece_quantizes_nothing(rows: Rows) -> None:
    qmap = state_maps("dynamic", CPU)[0]
    codes, maxima = quantize(rows.pad(torch.empty(rows.height, rows.width)), qmap, rows)
    assert codes.shape == (rows.height, rows.width)
    assert maxima.shape == (rows.height, rows.maxima)
    assert dequantize(codes, maxima, qmap, rows).numel() == 0


def test_dimensions_after_the_first_are_one_row() -> None:
    assert rows_of(torch.empty(3, 20, 30)) == Rows(3, 0, 600, 600)


def test_bitsandbytes_missing_or_too_old_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MisconfigurationException, match=r"bitsandbytes is not installed; pip install"):
        require_bitsandbytes()
    old = types.ModuleType("bitsandbytes")
    old.__version__ = "0.45.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", old)
    monkeypatch.setattr(torch.ops, "bitsandbytes", types.SimpleNamespace())
    with pytest.raises(MisconfigurationException, match=r"bitsandbytes 0.45.0 registers no operator .*; install 0.46"):
        require_bitsandbytes()
