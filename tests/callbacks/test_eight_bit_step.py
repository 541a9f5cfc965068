"""One step on local tensors: torch's own arithmetic around moments that are kept in codes."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor

from lit_stable.callbacks import eight_bit_step
from lit_stable.callbacks.eight_bit_blocks import Moment, dequantize, quantize, rows_of, state_maps
from lit_stable.callbacks.eight_bit_step import AdamArguments, Piece, step_8_bit, step_32_bit

CPU = torch.device("cpu")
MAPS = state_maps("dynamic", CPU)


def arguments(**options: Any) -> AdamArguments:
    defaults: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    defaults |= {"maximize": False, "decoupled": True, "grad_scale": None, "found_inf": None}
    return AdamArguments(**{**defaults, **options})


class Case:
    """A parameter with a gradient and moments that have learned something; copies of it are equal."""

    def __init__(self, shape: tuple[int, ...] = (20, 300), dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.p, self.g = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.rows = rows_of(self.p)
        values = [0.1 * torch.randn(shape, generator=generator), 0.01 * torch.rand(shape, generator=generator)]
        self.moments = [self.narrow(v, qmap) for v, qmap in zip(values, MAPS, strict=True)]
        self.step = torch.tensor(7.0)

    def narrow(self, values: Tensor, qmap: Tensor) -> Moment:
        flat = values.reshape(self.rows.height, self.rows.width)
        return Moment(*quantize(self.rows.pad(flat).clone(), qmap, self.rows), qmap)

    def wide(self) -> list[Tensor]:
        return [self.rows.unpad(dequantize(*m, self.rows)).reshape(self.p.shape).contiguous() for m in self.moments]

    def take(self, **options: Any) -> None:
        step_8_bit(self.p, self.g, *self.moments, self.step, self.rows, arguments(**options))

    def bits(self) -> list[Tensor]:
        return [self.p.clone(), *(t.clone() for m in self.moments for t in (m.codes, m.maxima))]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


OPTIONS = [{}, {"decoupled": False}, {"maximize": True}, {"grad_scale": torch.tensor(3.0)}, {"lr": torch.tensor(0.02)}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o), "plain"))
@pytest.mark.parametrize("shape", [(20, 300), (8, 512), (3, 20, 32)], ids=str)
def test_it_is_torchs_step_on_the_widened_moments_narrowed_again(shape: Any, options: dict[str, Any]) -> None:
    case, twin = Case(shape), Case(shape)
    exp_avg, exp_avg_sq = twin.wide()
    step_32_bit([Piece(twin.p, twin.g, exp_avg, exp_avg_sq, twin.step)], arguments(**options))
    case.take(**options)
    torch.testing.assert_close(case.p, twin.p, rtol=1e-6, atol=1e-7)  # padded rows take other vector instructions
    for moment, values, qmap in zip(case.moments, (exp_avg, exp_avg_sq), MAPS, strict=True):
        expected = twin.narrow(values, qmap)
        torch.testing.assert_close(moment.maxima, expected.maxima, rtol=1e-6, atol=0)
        assert (moment.codes != expected.codes).float().mean() < 1e-3  # a last bit may cross a boundary


def test_in_32_bit_it_is_torchs_own_optimizer_bit_for_bit() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 32))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    p, moments, step = weight.detach().clone(), [torch.zeros(8, 32) for _ in range(2)], torch.zeros(())
    for _ in range(3):
        weight.grad = torch.randn(8, 32)
        step += 1
        step_32_bit([Piece(p, weight.grad.clone(), *moments, step)], arguments())
        optimizer.step()
    assert torch.equal(p, weight)
    assert torch.equal(moments[1], optimizer.state[weight]["exp_avg_sq"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step_that_is_skipped_changes_no_bit_though_gradients_are_nan(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    before = case.bits()
    case.g.fill_(torch.nan)
    case.take(found_inf=torch.tensor(1.0))
    assert equal(case.bits(), before)
    p, moments = case.p.clone(), case.wide()
    piece = Piece(p, case.g, *moments, case.step)
    step_32_bit([piece], arguments(found_inf=torch.tensor(1.0)))
    assert equal([p, *moments], [case.p, *case.wide()])


def test_a_step_that_is_not_skipped_is_the_one_without_the_question() -> None:
    case, twin = Case(), Case()
    case.take(found_inf=torch.tensor(0.0))
    twin.take()
    assert equal(case.bits(), twin.bits())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_weights_are_stepped_on_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    case, twin = Case(dtype=dtype), Case()
    twin.p, twin.g = case.p.float(), case.g.float()
    case.take()
    twin.take()
    assert torch.equal(case.p, twin.p.to(dtype))
    assert equal(case.bits()[1:], twin.bits()[1:])


def test_another_layout_is_stepped_on_too() -> None:
    case, twin = Case(), Case()
    case.p, case.g = case.p.t().contiguous().t(), case.g.t().contiguous().t()
    case.take()
    twin.take()
    assert equal(case.bits(), twin.bits())
    assert not case.p.is_contiguous()


@pytest.mark.parametrize("width", [300, 512])
def test_rows_in_parts_are_the_rows_at_once(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, twin = Case((20, width)), Case((20, width))
    twin.take()
    monkeypatch.setattr(eight_bit_step, "MOST_ELEMENTS", 3 * width + 1)
    case.take()
    assert equal(case.bits(), twin.bits())


def test_bitsandbytes_own_step_from_the_same_state_has_the_same_codes() -> None:
    """Its arithmetic rounds elsewhere, and so moves a code now and then by one."""
    case, theirs = Case((64, 512)), Case((64, 512))
    case.take()
    first, second = theirs.moments
    bitsandbytes.functional.optimizer_update_8bit_blockwise(
        *("adam", theirs.g, theirs.p, first.codes, second.codes, 0.9, 0.95, 0.0, 0.0, 1e-8, 7, 1e-2),
        *(first.qmap, second.qmap, first.maxima.view(-1), second.maxima.view(-1), 0.1),
    )
    torch.testing.assert_close(case.p, theirs.p, rtol=1e-5, atol=1e-6)
    for ours, other in zip(case.moments, theirs.moments, strict=True):
        assert (ours.codes == other.codes).float().mean() >= 0.9999
        torch.testing.assert_close(ours.maxima, other.maxima, rtol=1e-6, atol=0)
