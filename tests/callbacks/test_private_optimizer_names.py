"""Pins the names of ``private_optimizer_names.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import private_optimizer_names


def test_a_hook_can_be_put_before_those_that_run_after_a_step() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    order: list[str] = []
    optimizer.register_step_post_hook(lambda *rest: order.append("earlier"))
    handle = private_optimizer_names.after_step_first(optimizer, lambda *rest: order.append("first"))
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert order == ["first", "earlier", "earlier"]


def test_a_scalers_factor_is_a_tensor_that_its_public_method_reads() -> None:
    seen: list[Any] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    look = Watch("on_before_optimizer_step", lambda t, o: seen.append(private_optimizer_names.loss_scale(t)))
    quiet_trainer(look, plugins=[plugin], max_steps=1).fit(TinyModule(), TinyData(resumes=False))
    assert torch.equal(seen[0], torch.tensor(32.0))
    assert scaler.get_scale() == 32.0
    assert private_optimizer_names.loss_scale(quiet_trainer()) is None
    off = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert private_optimizer_names.loss_scale(quiet_trainer(plugins=[off])) is None


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_leaves_the_division_to_fused_kernels_alone(fused: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(3.0 * weight.sum()).backward()
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *rest: seen.append(float(weight.grad)))
    scaler.step(optimizer)
    assert seen == [24.0 if fused else 3.0]
    assert private_optimizer_names.unscales_in_step(optimizer) == fused


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_the_fused_kernel_is_that_of_the_public_optimizer_and_counts_no_step(decoupled: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(8))
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = cls([weight], lr=0.1, weight_decay=0.5, fused=True)
    weight.grad = torch.randn(8)
    p, m, v, step = weight.detach().clone(), torch.zeros(8), torch.zeros(8), torch.ones(())
    kernel = private_optimizer_names.fused_adam(decoupled)
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.5, "eps": 1e-8, "amsgrad": False}
    options |= {"maximize": False, "grad_scale": torch.tensor(2.0)}
    kernel([p], [2 * weight.grad], [m], [v], [], [step], found_inf=torch.zeros(()), **options)
    optimizer.step()
    assert torch.equal(p, weight)
    assert float(step) == 1.0
    before = p.clone()
    kernel([p], [torch.full((8,), torch.nan)], [m], [v], [], [step], found_inf=torch.ones(()), **options)
    assert torch.equal(p, before)


def test_lightning_puts_a_mock_where_a_module_has_no_optimizer() -> None:
    class Without(TinyModule):
        def configure_optimizers(self) -> Any:
            return None

    trainer = quiet_trainer(max_steps=1)
    trainer.fit(Without(), TinyData(resumes=False))
    assert [private_optimizer_names.is_mock_optimizer(optimizer) for optimizer in trainer.optimizers] == [True]
    assert not private_optimizer_names.is_mock_optimizer(torch.optim.AdamW(TinyModule().parameters()))


def test_a_scheduler_pins_step_on_the_instance_and_a_swap_replaces_what_it_pinned() -> None:
    class Counting(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            Counting.calls += 1

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    assert private_optimizer_names.pinned_step(optimizer) is None
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert private_optimizer_names.pinned_step(optimizer) == "scheduler"
    optimizer.__class__ = Counting
    optimizer.step()
    assert Counting.calls == 0, "torch no longer pins it: the swap can be a plain one"
    optimizer.__class__ = torch.optim.SGD
    hooked: list[int] = []
    optimizer.register_step_pre_hook(lambda *rest: hooked.append(1))
    private_optimizer_names.swap_class(optimizer, Counting)
    optimizer.step()
    assert (Counting.calls, len(hooked)) == (1, 1)
    assert private_optimizer_names.pinned_step(optimizer) == "scheduler"
    assert optimizer._opt_called
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    assert private_optimizer_names.pinned_step(optimizer) == "other"
