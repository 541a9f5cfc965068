"""Skipping on one CUDA device: no step waits for it, and what the host learns comes exactly LAG steps later."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from no_sync import NoSync
from tiny_fit import TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import AccumulationWindows, GradClip, GradSpikeSkip, Progress
from lit_stable.callbacks.event_ring import LAG

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:GradSpikeSkip")]


class HeldScheduler(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def strict(**options: Any) -> GradSpikeSkip:
    return GradSpikeSkip(**{"z_score": 6.0, "warmup_steps": 2, "window": 16, **options})


def on_gpu(*callbacks: Any, **options: Any) -> Any:
    return quiet_trainer(*callbacks, **{"accelerator": "gpu", "max_steps": 12, "log_every_n_steps": 100, **options})


@pytest.mark.parametrize("signal", ["grad_norm", "both"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_step_waits_for_the_device_though_some_are_skipped_and_held(signal: str, precision: str) -> None:
    callback = strict(signal=signal, schedule_on_skip="hold", ratio=50.0, threshold=1e3)
    own = [callback, GradClip(0.5), AccumulationWindows(4, 2), NoSync()]
    trainer = on_gpu(*own, precision=precision)
    trainer.fit(HeldScheduler(adamw(lr=1e-3), poison={4: 1e5, 5: math.nan}), TinyData())
    assert [e.step for e in callback.events] == [5, 6]
    assert (Progress.of(trainer).skipped, tuple(Progress.of(trainer).held)) == (2, (2, 8, 32))


def test_an_event_is_known_lag_steps_later() -> None:
    known: list[int] = []
    callback = strict()
    watch = Watch("on_train_batch_end", lambda *a: known.append(len(callback.events)))
    on_gpu(watch, callback).fit(TinyModule(adamw(lr=1e-3), poison={4: math.nan}), TinyData())
    assert known == [int(step >= 5 + LAG) for step in range(1, 13)]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
@pytest.mark.parametrize(("factor", "halves"), [(1e3, False), (1e30, True)], ids=["spike", "overflow"])
def test_16_mixed_skips_bit_for_bit_and_the_scale_follows_overflows_alone(
    fused: bool, factor: float, halves: bool
) -> None:
    after: dict[int, Any] = {}

    def note(trainer: Any, *rest: Any) -> None:
        after[trainer.global_step] = (snapshot(trainer), trainer.precision_plugin.scaler.get_scale())

    callback = strict(z_score=8.0)
    plugin = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=16.0))
    trainer = on_gpu(callback, Watch("on_train_batch_end", note), plugins=[plugin])
    trainer.fit(TinyModule(adamw(lr=1e-4, fused=fused), poison={6: factor}), TinyData())
    assert_same_bits(after[7][0], after[6][0])
    assert after[7][1] == (8.0 if halves else 16.0)
    assert [(e.step, e.cause) for e in callback.events] == [(7, "overflow" if halves else "z_score")]
