"""The contract of every callback on two CUDA devices, under DDP, FSDP2 and FSDP1, in bf16 and in fp16."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from launch import run_scenarios
from rank_scenarios_contract import scenario_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

#: A launch for each, so that neither takes the other's time.
NAMES = {p: scenario_names("ddp", "fsdp2", "fsdp", precision=p) for p in ("bf16-mixed", "16-mixed")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def of_precision(precision: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("ranks")
        script = "rank_scenarios_contract.py"
        return run_scenarios(NAMES[precision], folder, accelerator="gpu", script=script, timeout=400)

    return of_precision


@pytest.mark.parametrize(("precision", "name"), [(p, name) for p, names in NAMES.items() for name in names])
def test_it_resumes_and_decides_alike_on_both_ranks(precision: str, name: str, results: Any) -> None:
    result = results(precision)[name]
    assert "error" not in result, result["error"]
    assert result == {}
