from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hosts import Wrapper
from lightning.pytorch.plugins import MixedPrecision
from tiny_fit import TinyModule, adamw, assert_same_bits, quiet_trainer
from torch import nn

from lit_stable.callbacks import Progress
from lit_stable.callbacks.device_step import (
    clear,
    divide_gradients,
    hook_steps,
    is_fused,
    skip_step,
    tell_of_sync,
)

both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])


def optimizer_with_gradients(fused: bool) -> Any:
    module = TinyModule(adamw(fused=fused))
    optimizer = module.configure_optimizers()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    return optimizer


def test_fused_means_every_group() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "fused": True}, {"params": [nn.Parameter(torch.zeros(1))]}]
    assert is_fused(torch.optim.AdamW(groups, fused=True))
    assert not is_fused(torch.optim.AdamW([*groups[:1], {"params": [nn.Parameter(torch.zeros(1))], "fused": False}]))
    assert not is_fused(torch.optim.RMSprop([nn.Parameter(torch.zeros(1))]))


def test_a_wrapper_around_a_fused_optimizer_is_not_fused_and_one_is_told_what_to_do(recwarn: Any) -> None:
    wrapped = Wrapper(torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True))
    assert all(group["fused"] for group in wrapped.param_groups)
    assert not is_fused(wrapped)
    for optimizer, remedy in (
        (wrapped, "return the fused one inside it from configure_optimizers"),
        (torch.optim.AdamW([nn.Parameter(torch.zeros(1))]), "give it fused=True"),
        (torch.optim.RMSprop([nn.Parameter(torch.zeros(1))]), "take one with a fused kernel"),
    ):
        tell_of_sync(optimizer, "GradSpikeSkip")
        assert remedy in str(recwarn.pop().message)


@both_kernels
@pytest.mark.parametrize(
    ("flags", "skipped"),
    [([True], 1), ([False], 0), ([True, True], 1), ([False, True], 1), ([True, False], 1), ([False, False], 0)],
)
def test_any_one_skip_holds_and_a_step_is_counted_once(fused: bool, flags: list[bool], skipped: int) -> None:
    trainer, optimizer = quiet_trainer(Progress()), optimizer_with_gradients(fused)
    weight = optimizer.param_groups[0]["params"][0]
    before = weight.detach().clone()
    for flag in flags:
        skip_step(trainer, optimizer, torch.tensor(flag))
    optimizer.step()
    assert Progress.of(trainer).skipped == skipped
    assert torch.equal(weight, before) == bool(skipped)


@both_kernels
def test_gradients_are_divided_by_the_product_of_all_divisors(fused: bool) -> None:
    optimizer = optimizer_with_gradients(fused)
    for divisor in (2.0, 4.0):
        divide_gradients(quiet_trainer(), optimizer, torch.tensor(divisor))
    optimizer.step()
    first = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]
    # (1 - beta1) * 2 / (2 * 4); beta1 = 0.9
    torch.testing.assert_close(first, torch.full_like(first, 0.1 * 0.25), rtol=1e-6, atol=0)


def test_dividing_where_no_gradient_is_left_does_nothing() -> None:
    optimizer = optimizer_with_gradients(fused=False)
    optimizer.zero_grad()
    divide_gradients(quiet_trainer(), optimizer, torch.tensor(2.0))
    assert all(p.grad is None for p in optimizer.param_groups[0]["params"])


@both_kernels
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD], ids=lambda c: c.__name__)
def test_a_skip_holds_for_every_optimizer_of_torch_that_has_a_fused_kernel(
    fused: bool, make: Callable[..., torch.optim.Optimizer]
) -> None:
    weight = nn.Parameter(torch.ones(3))
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = make([weight], lr=0.1, weight_decay=0.1, fused=fused, **options)
    trainer = quiet_trainer(Progress())
    hook_steps(quiet_trainer(), optimizer)
    weight.grad = torch.ones(3)
    optimizer.step()
    before = [weight.detach().clone(), {k: v.clone() for k, v in optimizer.state[weight].items()}]
    weight.grad = torch.full((3,), float("nan"))
    skip_step(trainer, optimizer, torch.tensor(True))
    optimizer.step()
    assert_same_bits([weight.detach(), dict(optimizer.state[weight])], before)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(weight, before[0])


def test_the_attributes_live_for_one_step() -> None:
    optimizer = optimizer_with_gradients(fused=True)
    handle = hook_steps(quiet_trainer(), optimizer)
    divide_gradients(quiet_trainer(), optimizer, torch.tensor(2.0))
    optimizer.step()
    assert not hasattr(optimizer, "grad_scale")
    handle.remove()
    divide_gradients(quiet_trainer(), optimizer, torch.tensor(2.0))
    optimizer.step()
    assert hasattr(optimizer, "grad_scale")
    clear(optimizer)
    clear(optimizer)  # nothing is there: nothing happens
    assert not hasattr(optimizer, "grad_scale")


def under_scaler(scale: float, **options: Any) -> tuple[Any, torch.amp.GradScaler]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
    return quiet_trainer(Progress(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)]), scaler


@pytest.mark.parametrize(("skip", "overflow"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_skip_holds_under_a_gradient_scaler_and_the_scale_follows_overflows_alone(skip: bool, overflow: bool) -> None:
    trainer, scaler = under_scaler(8.0)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    handle = hook_steps(trainer, optimizer)
    scaler.scale((weight * (float("inf") if overflow else 3.0)).sum()).backward()
    skip_step(trainer, optimizer, torch.tensor(skip))
    divide_gradients(trainer, optimizer, torch.tensor(2.0))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.ones(3)) == (skip or overflow)
    assert scaler.get_scale() == (4.0 if overflow else 8.0)
    assert not {"found_inf", "grad_scale", "stability_found_inf", "stability_divisor"} & vars(optimizer).keys()
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks


@both_kernels
@pytest.mark.parametrize("hooks", [1, 2])
@pytest.mark.parametrize("scaled", ["product", "overwritten", "disabled"])
def test_gradients_are_divided_once_under_a_gradient_scaler(fused: bool, hooks: int, scaled: str) -> None:
    trainer, scaler = under_scaler(8.0, enabled=scaled != "disabled")
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    if scaled == "overwritten":  # as an older torch does to a grad_scale that is there
        set_scale = lambda o, *rest: setattr(o, "grad_scale", torch.tensor(8.0)) if fused else None  # noqa: E731
        optimizer.register_step_pre_hook(set_scale)
    handles = [hook_steps(trainer, optimizer) for _ in range(hooks)]
    for step in (1, 2):
        optimizer.zero_grad()
        scaler.scale((weight * 3.0).sum()).backward()
        if not fused and scaled != "disabled":
            scaler.unscale_(optimizer)  # as Lightning does before its hook
        for divisor in (2.0, 3.0):
            divide_gradients(trainer, optimizer, torch.tensor(divisor))
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(weight.detach(), torch.ones(3) - 0.5 * step)  # 3 / (2 * 3)
        assert not {"found_inf", "grad_scale", "stability_found_inf", "stability_divisor"} & vars(optimizer).keys()
    for handle in handles:
        handle.remove()
    assert not optimizer._optimizer_step_pre_hooks or scaled == "overwritten"


def test_counting_skips_on_a_device_goes_on_from_the_count_on_the_host() -> None:
    progress = Progress()
    progress.note_skipped(True)
    for flag in (True, False, True):
        progress.note_skipped(torch.tensor(flag))
    assert progress.skipped == 3
    progress.note_skipped(torch.tensor(True))
    assert progress.skipped == 4
