"""The step in one pass against the path that widens moments, and against bitsandbytes' quantizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_fit import assert_same_bits

from lit_stable.callbacks import eight_bit_step
from lit_stable.callbacks.eight_bit_blocks import Moment, dequantize, quantize, rows_of, state_maps
from lit_stable.callbacks.eight_bit_step import AdamArguments, has_one_pass, step_8_bit

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"decoupled": False},
    "maximize": {"maximize": True},
    "no_beta1": {"beta1": 0.0},
    "scaled": {"grad_scale": 8.0},
    "rate_on_the_device": {"lr": torch.tensor(1e-2)},
    "taken": {"found_inf": 0.0},
}


def on_gpu(value: Any) -> Any:
    return torch.as_tensor(value, dtype=torch.float32, device="cuda") if value is not None else None


def arguments(**ways: Any) -> AdamArguments:
    usual = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
    given: dict[str, Any] = {**usual, "decoupled": True, "grad_scale": None, "found_inf": None, **ways}
    given.update({key: on_gpu(given[key]) for key in ("grad_scale", "found_inf")})
    given["lr"] = given["lr"].cuda() if isinstance(given["lr"], torch.Tensor) else given["lr"]
    return AdamArguments(**given)


def learned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    """(weight, gradient, first, second) that are the same at each call."""
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(shape, generator=generator).cuda() for _ in range(3))
    v = 0.01 * (0.01 + torch.rand(shape, generator=generator).cuda())
    moments = []
    for value, qmap in zip((m, v), state_maps("dynamic", p.device), strict=True):
        rows = rows_of(value)
        codes, maxima = quantize(rows.pad(value.reshape(rows.height, rows.width)), qmap, rows)
        moments.append(Moment(codes.contiguous(), maxima, qmap))
    return p.to(dtype), g.to(dtype), *moments


def both_ways(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], given: AdamArguments, **options: Any) -> Any:
    """What ``step_8_bit`` leaves of equal beginnings: in one pass, and by widening."""
    step = on_gpu(7.0)
    one, other = learned(shape, **options), learned(shape, **options)
    assert has_one_pass(*one, rows_of(one[0]), given)
    step_8_bit(*one, step, rows_of(one[0]), given)
    monkeypatch.setattr(eight_bit_step, "has_one_pass", lambda *rest: False)
    step_8_bit(*other, step, rows_of(other[0]), given)
    monkeypatch.undo()
    return one, other


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(512, 1024), (300, 257), (7, 100), (3, 5, 64)], ids=str)
def test_it_equals_the_path_that_widens(way: str, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (p, _, *moments), (q, _, *others) = both_ways(monkeypatch, shape, arguments(**WAYS[way]))
    start = learned(shape)[0]
    torch.testing.assert_close(p - start, q - start, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(moments, others, strict=True):
        assert (ours.codes == theirs.codes).float().mean() >= (0.9999 if p.numel() > 100_000 else 0.999)
        torch.testing.assert_close(ours.maxima, theirs.maxima, rtol=1e-5, atol=2e-7)  # a sum of two of about 1
        assert (ours.codes.int() - theirs.codes.int()).abs().max() <= 1


def test_second_moments_that_were_lost_are_bounded_by_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a half of the elements, all of whose first moments are known but every seventh."""

    def lost(*arguments: Any, known: Any = learned, **options: Any) -> Any:
        p, g, first, second = known(*arguments, **options)
        second.codes[:, ::2] = 0
        first.codes[:, ::7] = 127
        return p, g * 0, first, second

    monkeypatch.setitem(globals(), "learned", lost)
    (p, _, *moments), (q, _, *others) = both_ways(monkeypatch, (64, 512), arguments(weight_decay=0.0))
    start = learned((64, 512))[0]
    torch.testing.assert_close(p - start, q - start, rtol=1e-3, atol=1e-6)
    assert (p - start)[:, ::14].count_nonzero() == 0
    assert 1e2 < (p - start).abs().max() / 1e-2 < 1e6, "and not 1e8, as by eps"
    # Where gradients vanish the bound lies between two codes for ever, and either may be taken.
    assert (moments[1].codes.int() - others[1].codes.int()).abs().max() <= 1


def test_weights_in_16_bit_are_rounded_to_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    (p, *_), (q, *_) = both_ways(monkeypatch, (256, 512), arguments(), dtype=torch.bfloat16)
    assert (p == q).float().mean() > 0.9999


def test_a_skipped_step_leaves_every_bit() -> None:
    before, after = learned((64, 300)), learned((64, 300))
    after[1].fill_(float("nan"))
    step_8_bit(*after, on_gpu(7.0), rows_of(after[0]), arguments(found_inf=1.0))
    assert_same_bits([after[0], *after[2], *after[3]], [before[0], *before[2], *before[3]])


def test_codes_are_the_nearest_and_those_of_bitsandbytes() -> None:
    """From zero moments with beta 0 the moments are g and g^2, so a step quantizes what it is given."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    size = (4096, 1024)
    g = torch.randn(size, generator=generator, device="cuda")
    g *= 10.0 ** (-7 * torch.rand(size, generator=generator, device="cuda"))  # every decade of the map
    p, maps, rows = torch.zeros_like(g), state_maps("dynamic", g.device), rows_of(g)
    fresh = [Moment(*quantize(p, qmap, rows), qmap) for qmap in maps]
    step_8_bit(p, g, *fresh, on_gpu(1.0), rows, arguments(beta1=0.0, beta2=0.0, weight_decay=0.0))
    for moment, values in zip(fresh, (g, g * g), strict=True):
        codes, _ = quantize(values.clone(), moment.qmap, rows)
        assert (moment.codes == codes).float().mean() >= 0.9999
        scaled = values / moment.maxima.repeat_interleave(256, dim=1)
        found = dequantize(*moment, rows) / moment.maxima.repeat_interleave(256, dim=1)
        steps = torch.searchsorted(moment.qmap, scaled).clamp(1, 255)
        nearest = torch.minimum((moment.qmap[steps] - scaled).abs(), (moment.qmap[steps - 1] - scaled).abs())
        torch.testing.assert_close((found - scaled).abs(), nearest, rtol=1e-3, atol=2e-7)


def test_another_map_and_cut_blocks_take_the_other_path() -> None:
    p, g, first, second = learned((8, 256))
    rows = rows_of(p)
    assert not has_one_pass(p, g, first, second, rows, arguments(state_map="linear"))
    assert not has_one_pass(p, g, first, second, rows._replace(group=object()), arguments())
    assert not has_one_pass(p, g.t().contiguous().t(), first, second, rows, arguments())
