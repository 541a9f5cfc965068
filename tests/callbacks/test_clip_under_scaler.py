"""Clipping under a gradient scaler, as in 16-bit mixed precision: as without one, whatever the loss scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from tiny_fit import TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import GradClip, GradSpikeSkip, Progress, UpdateClip
from lit_stable.callbacks.ada_gc import AdaGC
from lit_stable.callbacks.z_clip import ZClip

both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
pytestmark = pytest.mark.filterwarnings("ignore:GradSpikeSkip")

RULES: dict[str, dict[str, Any]] = {
    "fixed": {"max_norm": 0.05},
    "largest element": {"max_norm": 0.02, "norm_type": "inf"},
    "z_clip": {"adaptive": ZClip(warmup_steps=3, z_threshold=0.5)},
    "layers": {"scope": "layer", "max_norm": 0.05},
    "tensors, z_clip": {"scope": "tensor", "adaptive": ZClip(warmup_steps=3, z_threshold=0.5)},
    "ada_gc": {"ada_gc": AdaGC(warmup_steps=3)},
    "ada_gc, largest element": {"ada_gc": AdaGC(warmup_steps=3), "norm_type": "inf"},
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


class Plain(TinyModule):
    """Computes in fp32; its gradient overflows at the steps in ``overflow``, while the loss is as ever."""

    def __init__(self, *args: Any, overflow: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.overflow = overflow

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        with torch.autocast("cpu", enabled=False):
            return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.trainer.global_step in self.overflow:
            self.net[0].weight.grad[0, 0] = math.inf


def fit(module: TinyModule, *callbacks: Any, scale: float | None = 256.0, **options: Any) -> tuple[Any, dict[int, Any]]:
    """(trainer, per step: state and loss scale after it); without a scaler where ``scale`` is ``None``."""
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
    after: dict[int, Any] = {}

    def note(trainer: Any, *rest: Any) -> None:
        after[trainer.global_step] = (snapshot(trainer), scaler.get_scale() if scaler else None)

    plugins = [] if scaler is None else [MixedPrecision("16-mixed", "cpu", scaler)]
    watch = Watch("on_train_batch_end", note)
    trainer = quiet_trainer(*callbacks, watch, **{"max_steps": 8, "plugins": plugins, **options})
    trainer.fit(module, TinyData())
    return trainer, after


@both_kernels
@every_rule
def test_clips_as_without_a_scaler(fused: bool, rule: dict[str, Any]) -> None:
    ends, states = [], []
    for scale in (None, 4096.0):
        callback = GradClip(**rule)
        make = lambda ps: torch.optim.SGD(ps, lr=0.5, momentum=0.9, fused=fused)  # noqa: E731 - the update shows the scale
        _, after = fit(Plain(make, poison={5: 30.0}), callback, scale=scale, log_every_n_steps=0)
        ends.append(after[8][0])
        states.append(callback.state_dict())
    assert_close(ends[1], ends[0])
    assert_close(states[1], states[0])
    assert states[0]["clipped"] > 0


def assert_close(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


@both_kernels
@every_rule
def test_an_overflow_changes_nothing_and_halves_the_loss_scale(fused: bool, rule: dict[str, Any]) -> None:
    callback = GradClip(**rule)
    trainer, after = fit(Plain(adamw(lr=1e-3, fused=fused), overflow=(4,)), callback, log_every_n_steps=0)
    assert_same_bits(after[5][0], after[4][0])
    assert not torch.equal(after[6][0]["weights"]["net.0.weight"], after[5][0]["weights"]["net.0.weight"])
    assert [scale for _, scale in after.values()] == [256.0] * 4 + [128.0] * 4
    assert Progress.of(trainer).skipped == 1


@both_kernels
def test_a_spike_is_skipped_and_the_steps_around_it_are_clipped(fused: bool) -> None:
    skip = GradSpikeSkip(z_score=6.0, warmup_steps=3, window=16)
    module = Plain(adamw(lr=1e-3, fused=fused), poison={5: 1e4})
    trainer, after = fit(module, clip := GradClip(0.05), skip, log_every_n_steps=0)
    assert_same_bits(after[6][0], after[5][0])
    assert {scale for _, scale in after.values()} == {256.0}
    assert clip.state_dict()["clipped"] >= 7
    (optimizer,) = trainer.optimizers
    assert not {"found_inf", "grad_scale", "stability_found_inf", "stability_divisor"} & vars(optimizer).keys()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@both_kernels
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_run_that_is_not_clipped_is_bit_identical_to_one_without_the_callback(fused: bool, scope: Any) -> None:
    ends = [
        fit(Plain(adamw(lr=1e-3, fused=fused)), *own)[1][8][0]
        for own in ([], [GradClip(1e6, scope=scope)], [GradClip(1e-3, scope=scope, action="log")])
    ]
    assert_same_bits(ends[1], ends[0])
    assert_same_bits(ends[2], ends[0])


def test_a_step_without_a_loss_leaves_no_divisor_for_the_next() -> None:
    class LastIsNone(Plain):
        """The second micro-batch of the first window has no loss, so the scaler takes no step."""

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    make = lambda ps: torch.optim.SGD(ps, lr=1.0, fused=True)  # noqa: E731 - the update is the gradient, as clipped
    module = LastIsNone(make)
    before = module.net[0].weight.detach().clone()
    weights: list[torch.Tensor] = []
    watch = Watch(
        "on_train_batch_end",
        lambda *rest: weights.append(torch.cat([p.detach().flatten() for p in module.parameters()])),
    )
    fit(module, GradClip(0.01), watch, accumulate_grad_batches=2, max_steps=2)
    assert torch.equal(weights[1][: before.numel()], before.flatten())
    assert (weights[3] - weights[2]).norm().item() == pytest.approx(0.01, rel=1e-4)


def test_the_level_is_in_the_units_of_the_unscaled_norm(tmp_path: Path) -> None:
    def levels(scale: float | None) -> list[float]:
        logger = CSVLogger(tmp_path)
        fit(
            Plain(adamw(lr=1e-3)),
            GradClip(adaptive=ZClip(warmup_steps=2)),
            scale=scale,
            logger=logger,
            log_every_n_steps=1,
        )
        header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
        return [float(row.split(",")[header.split(",").index("stability/clip_level")]) for row in rows]

    assert levels(1024.0) == pytest.approx(levels(None), rel=1e-5)


@both_kernels
@pytest.mark.parametrize("clip", [None, {"max_norm": 0.05}, {"max_norm": 0.05, "scope": "tensor"}], ids=str)
def test_updates_are_clipped_as_without_a_scaler(fused: bool, clip: dict[str, Any] | None) -> None:
    ends, states = [], []
    for scale in (None, 512.0):
        callback = UpdateClip(0.9)
        own = [callback] if clip is None else [callback, GradClip(**clip)]
        _, after = fit(Plain(adamw(lr=1e-2, fused=fused)), *own, scale=scale, log_every_n_steps=0)
        ends.append(after[8][0])
        states.append(callback.state_dict())
    assert_close(ends[1], ends[0])
    assert_close(states[1], states[0])
    assert 0 < states[0]["clipped"] < states[0]["seen"]


@both_kernels
def test_an_update_that_is_skipped_is_not_clipped(fused: bool) -> None:
    skip = GradSpikeSkip(z_score=6.0, warmup_steps=3, window=16)
    module = Plain(adamw(lr=1e-2, fused=fused), overflow=(0, 4), poison={6: 1e4})
    _, after = fit(module, callback := UpdateClip(0.5), skip, max_steps=9, log_every_n_steps=0)
    for step in (5, 7):
        assert_same_bits(after[step][0], after[step - 1][0])
    # RMS is 1 in the first step, so every one of 6 that were taken has a tensor above 0.5, and no skipped one.
    assert callback.state_dict()["clipped"] == 4 * 6
