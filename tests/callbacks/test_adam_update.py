"""The update that is recomputed after a step, against the step itself and against StableAdamW written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from stable_adam import SHAPES, clipped, gradients, stable_adam, weights
from torch import nn
from torch.optim import Adam, AdamW

from lit_stable.callbacks import adam_update
from lit_stable.callbacks.adam_update import AdamUpdate

KERNELS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "looped": {"foreach": False}}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decayed": {"weight_decay": 0.1},
    "betas": {"betas": (0.8, 0.95), "weight_decay": 0.1},
    "no first moment": {"betas": (0.0, 0.99)},
    "large eps": {"eps": 1e-2},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}


@every_kernel
@pytest.mark.parametrize("make", [AdamW, Adam], ids=lambda c: c.__name__)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fifty_steps_equal_stable_adamw_written_out(
    kernel: dict[str, Any], make: Callable[..., Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam_update, "CHUNK", 40)  # one tensor alone, two together
    threshold = 1.2
    parameters = weights()
    optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.01, **options, **kernel)
    update = AdamUpdate(optimizer)
    number = sum(clipped(optimizer, update, row, threshold) for row in gradients(50))
    assert 10 < number < 150
    expected = stable_adam(options, make is AdamW, 50, 0.01, threshold)
    for found, right in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found.detach().double(), right, rtol=2e-6, atol=2e-6)


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taking_all_of_it_back_undoes_the_update_and_nothing_of_it_leaves_every_bit(
    kernel: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters = weights(dtype)
    optimizer = AdamW(parameters, lr=0.05, weight_decay=0.0, **kernel)
    update = AdamUpdate(optimizer)
    for row in gradients(5, dtype):
        before = [p.detach().clone() for p in parameters]
        clipped(optimizer, update, row, math.inf)
        after = [p.detach().clone() for p in parameters]
        update.take_back(torch.tensor([1.0, 0.0, 1.0, 0.0]))
        for i, parameter in enumerate(parameters):
            if i % 2:
                assert torch.equal(parameter, after[i])
            else:
                tolerance = {"rtol": 0.0, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-3}
                torch.testing.assert_close(parameter.detach(), before[i], **tolerance)  # type: ignore[arg-type]


def test_the_rms_is_one_in_the_first_step_and_bounded_by_beta2() -> None:
    parameters = weights()
    optimizer = AdamW(parameters, lr=0.01, betas=(0.9, 0.95), fused=True)
    update = AdamUpdate(optimizer)
    rows = [*gradients(60), [torch.full(shape, 1e6) for shape in SHAPES]]
    seen = []
    for row in rows:
        clipped(optimizer, update, row, math.inf)
        seen.append(update.rms())
    torch.testing.assert_close(seen[0], torch.ones(len(SHAPES)), rtol=1e-4, atol=0)
    torch.testing.assert_close(seen[-1], torch.full((len(SHAPES),), 1 / math.sqrt(0.05)), rtol=0.03, atol=0)


def test_the_gradient_is_the_one_that_the_fused_kernel_divided() -> None:
    rms = []
    for scale in (None, 64.0):
        parameters = weights()
        optimizer = AdamW(parameters, lr=0.01, fused=True)
        update = AdamUpdate(optimizer)
        for row in gradients(6):
            if scale is not None:
                optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
            clipped(optimizer, update, [g * (scale or 1.0) for g in row], math.inf)
        rms.append(update.rms())
    torch.testing.assert_close(rms[1], rms[0])


@every_kernel
def test_a_tensor_without_a_gradient_and_one_that_never_stepped_are_left_alone(kernel: dict[str, Any]) -> None:
    parameters = weights()
    optimizer = AdamW(parameters, lr=0.01, **kernel)
    update = AdamUpdate(optimizer)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    after = [p.detach().clone() for p in parameters]
    rms = update.rms()
    assert rms[0] > 0.99
    assert rms[1:].tolist() == [0.0] * 3
    update.take_back(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    assert [torch.equal(p, a) for p, a in zip(parameters, after, strict=True)] == [False, True, True, True]


def test_a_skipped_first_step_makes_nothing_that_is_no_number() -> None:
    parameters = weights()
    optimizer = AdamW(parameters, lr=0.01, fused=True)
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in parameters]
    update = AdamUpdate(optimizer)
    clipped(optimizer, update, [torch.full(shape, math.nan) for shape in SHAPES], math.inf)
    update.take_back(torch.zeros(len(SHAPES)))
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


@every_kernel
def test_an_empty_tensor_has_size_zero_wherever_it_stands(kernel: dict[str, Any]) -> None:
    sizes, rates = (0, 3, 0, 2), (0.01, 0.01, 0.1, 0.1)
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.1}]
    optimizer = AdamW(groups, weight_decay=0.0, **kernel)
    update = AdamUpdate(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert update.rms().tolist() == pytest.approx([0.0, 1.0, 0.0, 1.0], abs=1e-4)
    update.take_back(torch.full((4,), 0.5))
    for parameter, size, rate in zip(parameters, sizes, rates, strict=True):
        torch.testing.assert_close(parameter.detach(), torch.full((size,), 1 - 0.5 * rate))


def test_a_rate_held_as_a_tensor_is_taken_as_one() -> None:
    ends = []
    for lr in (0.01, torch.tensor(0.01)):
        parameters = weights()
        optimizer = AdamW(parameters, lr=lr, fused=True)
        update = AdamUpdate(optimizer)
        for row in gradients(12):
            clipped(optimizer, update, row, 1.0)
        ends.append([p.detach() for p in parameters])
    torch.testing.assert_close(ends[1], ends[0])


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adamax])
def test_other_optimizers_are_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`UpdateClip`: {make.__name__} is neither torch's Adam nor"):
        AdamUpdate(make(weights()))


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`UpdateClip`: AdamW holds complex parameters"):
        AdamUpdate(AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))]))


def test_the_state_of_another_kind_of_adam_is_refused() -> None:
    class EightBit(AdamW):
        def step(self, closure: Any = None) -> None:
            self.state[parameter].update(state1=torch.zeros(2, dtype=torch.uint8), step=torch.zeros(()))

    parameter = nn.Parameter(torch.ones(2))
    optimizer = EightBit([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(
        MisconfigurationException,
        match=r"`UpdateClip`: the state of EightBit has no exp_avg, exp_avg_sq but state1, step;",
    ):
        AdamUpdate(optimizer).rms()
