"""Skipping under a gradient scaler, as in 16-bit mixed precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from tiny_fit import TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import GradNorm, GradSpikeSkip, Progress

both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
pytestmark = pytest.mark.filterwarnings("ignore:GradSpikeSkip")


class Overflowing(TinyModule):
    """Its gradient overflows at the steps in ``overflow``, while the loss is as ever; it computes in fp32."""

    def __init__(self, *args: Any, overflow: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.overflow = overflow

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        with torch.autocast("cpu", enabled=False):
            return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.trainer.global_step in self.overflow:
            next(self.parameters()).grad.fill_(math.inf)


def fit(module: TinyModule, *callbacks: Any, scale: float = 256.0, **options: Any) -> tuple[Any, dict[int, Any]]:
    """(trainer, per step: state and loss scale after it)."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000))
    after: dict[int, Any] = {}

    def note(trainer: Any, *rest: Any) -> None:
        after[trainer.global_step] = (snapshot(trainer), plugin.scaler.get_scale())

    watch = Watch("on_train_batch_end", note)
    trainer = quiet_trainer(*callbacks, watch, **{"max_steps": 10, "plugins": [plugin], **options})
    trainer.fit(module, TinyData())
    return trainer, after


def strict(**options: Any) -> GradSpikeSkip:
    return GradSpikeSkip(**{"z_score": 6.0, "warmup_steps": 4, "window": 16, **options})


@both_kernels
def test_a_spike_changes_nothing_and_does_not_lower_the_loss_scale(fused: bool) -> None:
    module = Overflowing(adamw(lr=1e-3, fused=fused), poison={6: 1e4})
    trainer, after = fit(module, callback := strict())
    assert_same_bits(after[7][0], after[6][0])
    assert not torch.equal(after[8][0]["weights"]["net.0.weight"], after[7][0]["weights"]["net.0.weight"])
    assert {scale for _, scale in after.values()} == {256.0}
    assert [(e.step, e.cause) for e in callback.events] == [(7, "z_score")]
    assert callback.state_dict()["counts"] == [1, 0]
    assert Progress.of(trainer).skipped == 1


@both_kernels
def test_an_overflow_changes_nothing_halves_the_loss_scale_and_is_counted_apart(fused: bool) -> None:
    module = Overflowing(adamw(lr=1e-3, fused=fused), overflow=(3, 6, 7))
    trainer, after = fit(module, callback := strict(max_skips=1))
    for step in (4, 7, 8):
        assert_same_bits(after[step][0], after[step - 1][0])
    assert [scale for _, scale in after.values()] == [256.0] * 3 + [128.0] * 3 + [64.0] + [32.0] * 3
    assert [(e.step, e.cause) for e in callback.events] == [(4, "overflow"), (7, "overflow"), (8, "overflow")]
    assert callback.state_dict()["counts"] == [0, 3]
    assert Progress.of(trainer).skipped == 3


@both_kernels
def test_an_overflow_is_counted_where_nobody_judges_the_norm(fused: bool) -> None:
    trainer, _ = fit(Overflowing(adamw(lr=1e-3, fused=fused), overflow=(3, 6, 7)), Progress())
    progress = Progress.of(trainer)
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert (progress.skipped, progress.skipped_last, steps) == (3, False, {progress.applied})
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


@both_kernels
def test_a_held_schedule_stands_still_over_overflows_and_spikes_alike(fused: bool) -> None:
    class Halving(Overflowing):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            halving = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda applied: 0.5**applied)
            return [optimizer], [{"scheduler": halving, "interval": "step"}]

    rates: list[float] = []
    note = Watch("on_before_optimizer_step", lambda t, o: rates.append(o.param_groups[0]["lr"]))
    module = Halving(adamw(lr=1.0, fused=fused), overflow=(1, 3), poison={4: math.nan})
    trainer, after = fit(module, strict(schedule_on_skip="hold"), note, max_steps=7)
    assert rates == [0.5**applied for applied in (0, 1, 1, 2, 2, 2, 3)]
    assert Progress.of(trainer).applied == 4
    assert after[7][1] == 256.0 / 8  # a loss that is not finite is the scaler's overflow as well


@both_kernels
@pytest.mark.parametrize("scale", [1.0, 256.0, 65536.0])
def test_norm_and_loss_are_those_of_the_unscaled_step(fused: bool, scale: float) -> None:
    def rows(**options: Any) -> list[tuple[float, float]]:
        callback = GradSpikeSkip(threshold=1e-9, signal="both", action="log")
        module = Overflowing(adamw(lr=1e-3, fused=fused))
        norms: list[float] = []
        watch = Watch("on_before_optimizer_step", lambda t, o: norms.append(float(GradNorm.of(t).value)))
        if "plugins" in options:
            quiet_trainer(callback, watch, max_steps=5).fit(module, TinyData())
        else:
            fit(module, callback, watch, max_steps=5, **options)
        assert [e.norm for e in callback.events] == norms
        return [(e.norm, e.loss) for e in callback.events]  # type: ignore[misc]

    torch.testing.assert_close(torch.tensor(rows(scale=scale)), torch.tensor(rows(plugins=[])), rtol=1e-6, atol=0)


@both_kernels
def test_a_run_without_spikes_is_bit_identical_to_one_without_the_callback(fused: bool) -> None:
    ends = [fit(Overflowing(adamw(lr=1e-3, fused=fused)), *own)[1][10][0] for own in ([], [strict()])]
    assert_same_bits(ends[1], ends[0])


@both_kernels
def test_attributes_and_hooks_are_gone_after_the_fit(fused: bool) -> None:
    trainer, _ = fit(Overflowing(adamw(fused=fused), poison={6: 1e4}), strict())
    (optimizer,) = trainer.optimizers
    assert not {"found_inf", "grad_scale", "stability_found_inf"} & vars(optimizer).keys()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
