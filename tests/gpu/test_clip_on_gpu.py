"""Clipping by parts and by updates on one CUDA device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from stable_adam import gradients, stable_adam, weights
from tiny_fit import TinyData, TinyModule, Watch, adamw, quiet_trainer, snapshot
from tiny_gpt_run import GLOBAL_BATCH, MICRO_BATCH, NumberedData, tiny_module

from lit_stable.callbacks import AccumulationWindows, GradClip, GradSpikeSkip, Progress, UpdateClip
from lit_stable.callbacks.ada_gc import AdaGC
from lit_stable.callbacks.adam_update import AdamUpdate
from lit_stable.callbacks.z_clip import ZClip

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:GradSpikeSkip")]

RULES: dict[str, dict[str, Any]] = {
    "global": {"max_norm": 0.05},
    "layers, z_clip": {"scope": "layer", "adaptive": ZClip(warmup_steps=3, z_threshold=0.5)},
    "ada_gc": {"ada_gc": AdaGC(warmup_steps=3)},
    "ada_gc, largest element": {"ada_gc": AdaGC(warmup_steps=3), "norm_type": "inf"},
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
@every_rule
def test_no_step_waits_for_the_device(strategy: str, rule: dict[str, Any]) -> None:
    mode = torch.cuda.set_sync_debug_mode
    watches = [
        Watch("on_train_batch_start", lambda t, *rest: mode("error" if 2 <= t.global_step < 8 else "default")),
        Watch("teardown", lambda *rest: mode("default")),
    ]
    own = [GradClip(**rule), UpdateClip(0.9), GradSpikeSkip(), AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH)]
    options = {"accelerator": "gpu", "strategy": strategy, "precision": "bf16-mixed", "use_distributed_sampler": False}
    trainer = quiet_trainer(*own, *watches, max_steps=10, log_every_n_steps=10, **options)
    trainer.fit(tiny_module(), datamodule=NumberedData())
    assert trainer.global_step == 10


@pytest.mark.parametrize("kernel", [{"fused": True}, {"foreach": True}, {"capturable": True, "foreach": True}], ids=str)
def test_fifty_steps_equal_stable_adamw_written_out(kernel: dict[str, Any]) -> None:
    parameters = weights(device="cuda")
    optimizer = torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, **kernel)
    update = AdamUpdate(optimizer)
    for row in gradients(50):
        scale = 16.0 if kernel.get("fused") else 1.0  # the kernel divides, and writes back what it used
        for parameter, gradient in zip(parameters, row, strict=True):
            parameter.grad = scale * gradient.cuda()
        if scale > 1:
            optimizer.grad_scale = torch.tensor(scale, device="cuda")  # type: ignore[attr-defined]
        optimizer.step()
        rms = update.rms()
        update.take_back(torch.where(rms > 1.2, 1 - 1.2 / rms, 0.0))
    expected = stable_adam({"betas": (0.9, 0.95), "weight_decay": 0.1}, True, 50, 0.01, 1.2)
    for found, right in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found.detach().cpu().double(), right, rtol=5e-6, atol=5e-6)


@every_rule
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
def test_16_mixed_clips_whatever_the_loss_scale(rule: dict[str, Any], fused: bool) -> None:
    ends = []
    for scale in (4.0, 64.0):
        scaler = torch.amp.GradScaler("cuda", init_scale=scale, growth_interval=10_000)
        own = [GradClip(**rule), UpdateClip(0.9)]
        plugin = MixedPrecision("16-mixed", "cuda", scaler)
        trainer = quiet_trainer(*own, accelerator="gpu", max_steps=8, log_every_n_steps=0, plugins=[plugin])
        trainer.fit(TinyModule(adamw(lr=1e-3, fused=fused), poison={4: math.nan}), TinyData())
        assert Progress.of(trainer).skipped == 1
        assert scaler.get_scale() == scale / 2
        ends.append(snapshot(trainer)["weights"])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
