"""Skipping with two CUDA devices, sharded in both ways: a spike and an overflow that one of them meets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import run_scenarios
from rank_scenarios_skip import check_spike_and_overflow, spike_scenarios

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NAMES = spike_scenarios("fsdp2", "fsdp", "ddp")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_scenarios(NAMES, folder, accelerator="gpu", script="rank_scenarios_skip.py")


@pytest.mark.parametrize("name", NAMES)
def test_both_skip_on_both_devices_and_the_scale_follows_the_overflow_alone(results: dict[str, Any], name: str) -> None:
    assert "error" not in results[name], results[name]["error"]
    check_spike_and_overflow(name, results[name])
