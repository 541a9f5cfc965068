"""Shards that are written while two CUDA devices train: the scenarios of the CPU, on NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NAMES = ["goes_on_fsdp2", "goes_on_fsdp", "several_in_a_row_with_eight_bits", "a_part_that_cannot_be_written"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), accelerator="gpu", script="rank_scenarios_saves.py")


@of("goes_on_fsdp2", "goes_on_fsdp")
def test_the_weights_of_the_step_are_copied_and_written_while_training_goes_on(result: Any) -> None:
    assert result["seen"] == [[False, True]] * len(result["seen"]), "it could not be written before the last step"
    assert result["seen"]
    assert result["names"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "meta.pt"]
    assert result["damage"] is None
    assert result["weights"]


@of("several_in_a_row_with_eight_bits")
def test_each_waits_for_the_one_before(result: Any) -> None:
    assert [result[key] for key in ("left", "step", "eight_bit", "damage")] == [["a.ckpt"], 3, True, None]


@of("a_part_that_cannot_be_written")
def test_all_ranks_are_told_of_a_part_that_could_not_be_written(result: Any) -> None:
    sentence = "CheckpointError: HERE/a.ckpt: could not be written (No space left on device; "
    assert [told[: len(sentence)] for told in result["told"]] == [sentence] * 2
    assert result["left"] == ["before.ckpt"]
