"""The contract of every callback on two CUDA devices, under DDP, FSDP2 and FSDP1, in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios_contract import scenario_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NAMES = scenario_names("ddp", "fsdp2", "fsdp")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_scenarios(NAMES, folder, accelerator="gpu", script="rank_scenarios_contract.py", timeout=400)


@of(*NAMES)
def test_it_resumes_and_decides_alike_on_both_ranks(result: dict[str, Any]) -> None:
    assert result == {}
