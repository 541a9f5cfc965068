"""Sharded checkpoints that are written while two ranks train."""

from __future__ import annotations

from typing import Any

import pytest
from launch import of, run_scenarios

NAMES = [
    "goes_on_fsdp2",
    "goes_on_fsdp",
    *("one_file_ddp", "one_file_fsdp2_full"),
    "several_in_a_row_with_eight_bits",
    "a_part_that_cannot_be_written",
    "training_fails_and_a_part_does_not_come",
    "training_fails_and_all_parts_come",
    "ended_in_mid_window",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_saves.py", timeout=150)


@of("goes_on_fsdp2", "goes_on_fsdp")
def test_training_goes_on_while_the_shards_of_the_step_are_written(result: Any) -> None:
    assert result["seen"] == [[False, True]] * len(result["seen"]), "it could not be written before the last step"
    assert result["seen"]
    assert result["rows"]


@of("goes_on_fsdp2", "goes_on_fsdp")
def test_what_is_written_later_is_what_would_have_been_written_at_once(result: Any) -> None:
    assert result["names"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "meta.pt"]
    assert result["damage"] is None
    assert result["same"]
    assert result["weights"]
    assert result["tensors"] > 40
    assert 0.5 < result["grown"] < 1.1
    assert result["resumed"]


@of("one_file_ddp", "one_file_fsdp2_full")
def test_one_file_is_written_by_rank_0_while_both_ranks_train(result: Any) -> None:
    assert result == {"rows": True, "left": ["at_once.ckpt", "background.ckpt"], "damage": None, "resumed": True}


@of("several_in_a_row_with_eight_bits")
def test_each_waits_for_the_one_before(result: Any) -> None:
    assert result == {"rows": True, "left": ["a.ckpt"], "step": 3, "eight_bit": True, "damage": None}


@of("a_part_that_cannot_be_written")
def test_all_ranks_are_told_of_a_part_that_could_not_be_written(result: Any) -> None:
    sentence = "CheckpointError: HERE/a.ckpt: could not be written (No space left on device; "
    assert [told[: len(sentence)] for told in result["told"]] == [sentence] * 2
    assert result["left"] == ["before.ckpt"]


@of("training_fails_and_a_part_does_not_come")
def test_a_rank_that_fails_does_not_wait_for_long_for_one_that_hangs(result: Any) -> None:
    assert result["told"] == ["ValueError: of training"] * 2
    assert "a.ckpt: rank 1 has not said within" in result["said"][0][0]
    assert result["left"] == ["before.ckpt"]


@of("training_fails_and_all_parts_come")
def test_what_is_being_written_when_training_fails_is_finished(result: Any) -> None:
    assert result == {"told": ["ValueError: of training"] * 2, "said": [[], []], "left": ["a.ckpt", "before.ckpt"]}


@of("ended_in_mid_window")
def test_the_last_step_of_a_fit_that_ends_within_a_window_is_saved_by_all_ranks(result: Any) -> None:
    assert result == {"left": ["step-00000002.ckpt"], "damage": None, "same": [True, True]}
