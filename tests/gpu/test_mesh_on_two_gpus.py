"""Tensor parallelism, copies of shards, and every precision, on two CUDA devices with NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios_fp16 import OVERFLOWED
from rank_scenarios_layout import ALL_KINDS, SPLIT_MODELS, leave_alone
from tiny_gpt_run import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),
]

SPLIT = [f"split_{model}" for model in SPLIT_MODELS]
NAMES = [
    *SPLIT,
    "compiled_tensor",
    "two_copies",
    "every_precision",
    "overflow_16_mixed",
    "overflow_16_true",
    "overflow_tensor_16_true",
    "overflow_ddp",
    "overflow_fsdp",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    leave_alone(folder, "gpu")
    return run_scenarios(NAMES, folder, accelerator="gpu", script="rank_scenarios_layout.py")


@of(*SPLIT)
def test_two_tensor_parallel_gpus_are_one_within_the_kernels_noise(result: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(result["alone"]), rtol=1e-4, atol=1e-5)
    assert {name: apart for name, apart in result["gradients"].items() if apart > 2e-3} == {}
    assert result["copies"], "what both ranks hold has drifted apart"


@of("compiled_tensor")
def test_split_blocks_compile(result: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(result["compiled"]), torch.tensor(result["plain"]), rtol=2e-3, atol=1e-3)


@of("two_copies")
def test_two_copies_agree_with_one_gpu(result: dict[str, Any]) -> None:
    alone = fit(accelerator="gpu", steps=4, **ALL_KINDS)
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-3, atol=1e-4)


@of("every_precision")
def test_every_cell_trains(result: dict[str, Any]) -> None:
    assert len(result) == 5 + 4 + 4
    reference = result["ddp 32-true"][0]
    assert {cell: loss for cell, (loss, _) in result.items() if not abs(loss - reference) < 0.05} == {}
    for cell, (_, dtypes) in result.items():
        assert dtypes == ["torch.bfloat16" if "bf16-true" in cell else "torch.float32"], cell


@of("overflow_16_mixed", "overflow_16_true", "overflow_tensor_16_true", "overflow_ddp", "overflow_fsdp")
def test_an_overflow_on_one_gpu_stops_the_step_and_halves_the_scale_on_both(result: dict[str, Any]) -> None:
    assert result["ranks"] == [OVERFLOWED] * 2
