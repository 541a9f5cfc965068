from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
from tiny_gpt_run import GLOBAL_BATCH, LENGTH, MICRO_BATCH, fit

from lit_stable.callbacks import Throughput
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.peak_flops import peak_flops
from lit_stable.callbacks.throughput import multiplied
from lit_stable.model.formulas import flops_per_token


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time that passes only where a test lets it."""
    now = SimpleNamespace(seconds=50.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.seconds)
    return now


def passing(clock: Any, seconds: float, hook: str = "on_train_batch_start") -> Watch:
    def wait(*ignored: Any) -> None:
        clock.seconds += seconds

    return Watch(hook, wait)


def test_tokens_per_second_and_mfu_of_the_interval_without_validations(clock: Any) -> None:
    watches = passing(clock, 0.5), passing(clock, 1000.0, "on_validation_batch_start")
    run = fit(steps=4, callbacks=(Throughput(peak_flops=1e6), *watches))
    seconds = 0.5 * GLOBAL_BATCH / MICRO_BATCH
    rate = GLOBAL_BATCH * LENGTH / seconds
    metrics = run.trainer.callback_metrics
    assert float(metrics["stability/tokens_per_second"]) == rate
    assert float(metrics["stability/tokens_per_second_per_device"]) == rate
    assert float(metrics["stability/mfu"]) == pytest.approx(flops_per_token(run.module.config, LENGTH) * rate / 1e6)


def test_a_module_that_does_not_say_is_counted_by_its_weights_and_a_number_of_ones_own_wins(clock: Any) -> None:
    found = []
    for options in ({}, {"flops_per_token": 10.0}):
        monitor = Throughput(peak_flops=1e3, **options)
        trainer = quiet_trainer(monitor, passing(clock, 1.0), max_steps=1, log_every_n_steps=1)
        trainer.fit(TinyModule(), TinyData())
        found.append(float(trainer.callback_metrics["stability/mfu"]))
    weights = 4 * 8 + 8 + 8 * 4 + 4
    tokens = 8  # two samples of four in a second
    assert found == pytest.approx([6 * weights * tokens / 1e3, 10 * tokens / 1e3])


def test_a_table_counts_only_when_a_head_shares_it() -> None:
    module = torch.nn.Module()
    module.table, module.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    assert list(multiplied(module)) == ["head.weight"]
    module.head.weight = module.table.weight
    assert list(multiplied(module)) == ["table.weight"]


def test_where_no_peak_is_known_there_is_no_mfu() -> None:
    trainer = quiet_trainer(Throughput(), max_steps=1, log_every_n_steps=1)
    trainer.fit(TinyModule(), TinyData())
    assert "stability/mfu" not in trainer.callback_metrics
    assert float(trainer.callback_metrics["stability/tokens_per_second"]) > 0


@pytest.mark.parametrize("option", ["flops_per_token", "peak_flops"])
def test_numbers_that_are_not_above_0_are_refused(option: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`Throughput\({option}=0\)`: must be above 0"):
        Throughput(**{option: 0})


@pytest.mark.parametrize(
    ("card", "half"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A10G", None),
        ("Some other card", None),
    ],
)
def test_a_card_by_its_name(card: str, half: float | None) -> None:
    assert peak_flops(card, "bf16-mixed") == half


def test_fp32_takes_tf32_only_where_it_is_allowed() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_flops("NVIDIA H100 80GB HBM3", "32-true") == pytest.approx(66.9e12)
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA H100 80GB HBM3", "32-true") == pytest.approx(494.7e12)
        assert peak_flops("Tesla T4", "32-true") == pytest.approx(8.1e12)
        assert peak_flops("NVIDIA H100 80GB HBM3", "64-true") is None
    finally:
        torch.set_float32_matmul_precision(before)
