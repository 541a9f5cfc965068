"""What needs one CUDA device."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from no_sync import NoSync
from tiny_fit import quiet_trainer
from tiny_gpt_run import GLOBAL_BATCH, MICRO_BATCH, NumberedData, fit, tiny_module

from lit_stable.callbacks import (
    AccumulationWindows,
    DeferredLogging,
    GracefulStop,
    GradClip,
    GradSpikeSkip,
    LROverride,
    SafeCheckpoints,
    StepSeed,
    WeightMonitor,
)
from lit_stable.run.report import Report

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
@pytest.mark.parametrize("compile", ["off", "on"])
def test_no_step_waits_for_the_device(strategy: str, compile: str) -> None:
    own = [
        GradClip(0.5),
        AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH),
        StepSeed(3),
        SafeCheckpoints(),
        GracefulStop(),
    ]
    options = {"accelerator": "gpu", "strategy": strategy, "precision": "bf16-mixed", "use_distributed_sampler": False}
    trainer = quiet_trainer(*own, NoSync(), max_steps=10, log_every_n_steps=10, **options)
    trainer.fit(tiny_module(compile=compile, dropout=0.1), datamodule=NumberedData())
    assert trainer.global_step == 10


def test_the_gpu_agrees_with_the_cpu() -> None:
    cpu, gpu = fit(), fit(accelerator="gpu", module=on_gpu_with_cpu_weights())
    torch.testing.assert_close(torch.tensor(gpu.rows), torch.tensor(cpu.rows), rtol=2e-3, atol=2e-4)


def on_gpu_with_cpu_weights() -> Any:
    """The generators differ by device: start the GPU's model from the CPU's draw."""
    module = tiny_module()
    draw = fit(steps=1).module  # its first step has learning rate 0
    build = module.configure_model

    def configure_model() -> None:
        if module.gpt is None:
            build()
            module.gpt.load_state_dict(draw.gpt.state_dict())

    module.configure_model = configure_model
    return module


def test_bf16_mixed_and_compile_stay_close_to_fp32() -> None:
    plain = fit(accelerator="gpu")
    for options in ({"precision": "bf16-mixed"}, {"compile": "on"}, {"precision": "bf16-mixed", "strategy": "fsdp2"}):
        other = fit(accelerator="gpu", **options)
        losses = [torch.tensor([row[1] for row in run.rows]) for run in (plain, other)]
        torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.02)
        assert {p.dtype for p in other.module.parameters()} == {torch.float32}


def test_compiled_or_not_dropout_drops_the_same() -> None:
    plain, compiled = (fit(accelerator="gpu", module=tiny_module(compile=how, dropout=0.2)) for how in ("off", "on"))
    losses = [torch.tensor([row[1] for row in run.rows]) for run in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)


def test_selective_recomputation_is_kept_by_the_compiler_too() -> None:
    ways: tuple[Any, ...] = (False, True, "selective")
    losses, memory = [], []
    for how in ways:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        options = {"n_layer": 8, "d_model": 512, "n_head": 8, "dropout": 0.1}
        run = fit(accelerator="gpu", precision="bf16-mixed", module=tiny_module("on", how, **options))
        losses.append(torch.tensor([row[1] for row in run.rows]))
        memory.append(torch.cuda.max_memory_allocated() - before)
        del run
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=2e-2, atol=2e-2)
    assert memory[1] <= memory[2] <= memory[0], memory


def test_logging_does_not_wait_either(tmp_path: Any) -> None:
    """Each step is logged, printed and written down; only the first, which makes Lightning's own records, may wait."""
    logger = CSVLogger(tmp_path)
    own = [
        GradClip(0.5),
        GradSpikeSkip(),
        AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH),
        LROverride(factor=0.5),
        WeightMonitor(),
        DeferredLogging(),
        Report(""),
    ]
    options = {"accelerator": "gpu", "precision": "bf16-mixed", "use_distributed_sampler": False}
    trainer = quiet_trainer(*own, NoSync(), max_steps=10, log_every_n_steps=1, logger=logger, **options)
    trainer.fit(tiny_module(), datamodule=NumberedData())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == list(range(1, 11))
    assert all(float(row["stability/clip_frac"]) >= 0 and float(row["train/loss"]) > 0 for row in rows)
