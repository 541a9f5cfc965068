"""Monitors on two CUDA devices: the scenarios of the CPU on NCCL, and FSDP1, which has no CPU path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NAMES = ["by_hand_fsdp2", "watched_fsdp", "late_in_every_training_step_ddp", "flipped_ddp", "samples_fsdp2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_scenarios(NAMES, folder, accelerator="gpu", script="rank_scenarios_monitors.py")


@of("by_hand_fsdp2")
def test_numbers_of_a_sharded_run_are_those_of_the_definitions(result: dict[str, Any]) -> None:
    assert result["parameters"][1] == {}
    assert result["inside"][0] == []
    assert result["inside"][1] < 0.01
    assert result["ranks_agree"]


@of("watched_fsdp")
def test_fsdp1_is_watched_and_not_changed(result: dict[str, Any]) -> None:
    assert result["apart"] < 2e-3  # attention's backward pass sums in no fixed order
    assert result["freed"] == [True]
    assert len(result["held"]) == 1  # shards alone in an open window too
    assert result["off"] < 1e-3  # against the same run under DDP
    assert result["count"] > 80
    assert result["violations"] == 0


@of("late_in_every_training_step_ddp")
def test_the_rank_that_is_late_is_named(result: dict[str, Any]) -> None:
    assert [evidence["rank"] for kind, _, evidence in result["events"] if kind == "straggler"] == [1]


@of("flipped_ddp")
def test_a_flipped_bit_is_found(result: dict[str, Any]) -> None:
    assert [evidence["ranks"] for _, evidence in result["events"]] == [[1], [1]]


@of("samples_fsdp2")
def test_a_sharded_model_writes_the_same_on_both_ranks(result: dict[str, Any]) -> None:
    assert result["sharded"][0] == result["sharded"][1]
