"""Monitors on CUDA: no step between logging steps waits for the device, and compiled blocks are seen as eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activations_by_hand import LastBatch, expected_of
from by_hand import ByHand, differences
from lightning.pytorch import Callback
from no_sync import NoSync
from tiny_fit import quiet_trainer
from tiny_gpt_run import GLOBAL_BATCH, MICRO_BATCH, NumberedData, fit, tiny_module

from lit_stable.callbacks import (
    AccumulationWindows,
    ActivationMonitor,
    AttentionMonitor,
    DiskSpace,
    GarbageCollection,
    GracefulStop,
    GradClip,
    GradientMonitor,
    HangWatchdog,
    InvariantCheck,
    OptimizerMonitor,
    OutputMonitor,
    RecoveryTime,
    SafeCheckpoints,
    SampleText,
    SourceLoss,
    StepSeed,
    StepTimer,
    Throughput,
    TokenStatistics,
    UpdateMonitor,
    WeightMonitor,
)
from lit_stable.callbacks.device_probe import DeviceProbe
from lit_stable.callbacks.private_names import compiled_graphs

pytestmark = pytest.mark.gpu

FAMILIES = ("stability/activation_", "stability/attention_logit", "stability/log_z", "stability/output_logit")


def everything() -> list[Callback]:
    return [
        *(WeightMonitor(), GradientMonitor(), UpdateMonitor(), OptimizerMonitor()),
        *(ActivationMonitor(), AttentionMonitor(), OutputMonitor(), TokenStatistics(), SourceLoss(names=["all"])),
        *(
            StepTimer(),
            Throughput(),
            RecoveryTime(),
            InvariantCheck(),
            DiskSpace(),
            HangWatchdog(),
            GarbageCollection(3),
        ),
        SampleText(prompt_ids=[[1, 2, 3], [7]], new_tokens=6),
    ]


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
@pytest.mark.parametrize("compile", ["off", "on"])
def test_no_step_between_logging_steps_waits_for_the_device(strategy: str, compile: str) -> None:
    spine = [
        GradClip(0.5),
        AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH),
        StepSeed(3),
        SafeCheckpoints(),
        GracefulStop(),
    ]
    options = {"accelerator": "gpu", "strategy": strategy, "precision": "bf16-mixed", "use_distributed_sampler": False}
    trainer = quiet_trainer(*spine, *everything(), NoSync(), max_steps=10, log_every_n_steps=10, **options)
    trainer.fit(tiny_module(compile=compile, dropout=0.1), datamodule=NumberedData())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["stability/activation_rms/gpt.blocks.1.fc2"] > 0
    assert metrics["stability/invariant_violations"] == 0
    assert metrics["stability/step_seconds"] > 0


@pytest.mark.parametrize(
    "options", [{}, {"strategy": "fsdp2"}, {"precision": "bf16-mixed"}], ids=["fp32", "fsdp2", "bf16"]
)
def test_compiled_blocks_are_seen_and_nothing_more_is_compiled(options: dict[str, Any]) -> None:
    torch._dynamo.reset()  # what another test compiled would be found, and not counted
    before = compiled_graphs()
    fit(accelerator="gpu", steps=3, compile="on", **options)
    graphs = compiled_graphs() - before
    torch._dynamo.reset()
    hand, last = ByHand(), LastBatch()
    four = (WeightMonitor(), GradientMonitor(None, True), UpdateMonitor(None, True), OptimizerMonitor(None, True))
    inside = (ActivationMonitor(), AttentionMonitor(), OutputMonitor())
    run = fit(accelerator="gpu", steps=3, compile="on", callbacks=(hand, last, *four, *inside), max_norm=1e9, **options)
    assert compiled_graphs() - before == 2 * graphs
    assert differences(hand.expected, run.trainer.callback_metrics) == {}
    weights = {name: weight.cpu() for name, weight in last.weights.items()}
    expected = expected_of(run.module.config, weights, last.ids.cpu())
    found = {n: float(v) for n, v in run.trainer.callback_metrics.items() if n.startswith(FAMILIES)}
    assert found == pytest.approx(expected, rel=0.03 if options.get("precision") else 2e-3, abs=1e-3)


def test_attention_logits_of_a_compiled_kernel_are_seen_with_its_mask_and_bias() -> None:
    options: dict[str, Any] = {"position": "alibi", "attention_soft_cap": 5.0, "document_mask": True}
    last = LastBatch()
    callbacks = (last, ActivationMonitor(), AttentionMonitor(), OutputMonitor())
    run = fit(accelerator="gpu", steps=2, compile="on", callbacks=callbacks, document_separator=3, **options)
    weights = {name: weight.cpu() for name, weight in last.weights.items()}
    expected = expected_of(run.module.config, weights, last.ids.cpu())
    found = {n: float(v) for n, v in run.trainer.callback_metrics.items() if n.startswith(FAMILIES)}
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-3)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_the_draws_of_a_watched_run_are_those_of_a_bare_one(compile: str) -> None:
    """Attention's backward pass adds up in no fixed order, so losses are near; another dropout mask would be seen."""
    options: dict[str, Any] = {"accelerator": "gpu", "steps": 4, "dropout": 0.5, "compile": compile}
    bare, watched = fit(**options), fit(**options, callbacks=tuple(everything()))
    torch.testing.assert_close(torch.tensor(watched.rows), torch.tensor(bare.rows), rtol=2e-3, atol=2e-4)


def test_the_probe_times_its_work() -> None:
    probe = DeviceProbe(torch.device("cuda"))
    assert probe.seconds() == 0.0
    probe.start()
    assert 0 < probe.seconds() < 1
