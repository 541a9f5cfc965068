"""Monitors on two gloo processes: the same numbers as by hand, the same bits, the right rank named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import of, run_scenarios

NAMES = [
    "by_hand_ddp",
    "by_hand_fsdp2",
    "bits_ddp",
    "bits_fsdp2",
    "bits_fsdp2_bf16",
    "watched_fsdp",
    "late_in_every_training_step_ddp",
    "late_in_every_batch_fsdp2",
    "late_once_fsdp2",
    "flipped_ddp",
    "flipped_ddp_raises",
    "flipped_norm_fsdp2",
    "nothing_flipped_fsdp2",
    "tokens_and_sources_ddp",
    "samples_fsdp2",
    "sums_tensor_parallel",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_monitors.py")


@of("by_hand_ddp", "by_hand_fsdp2")
def test_all_numbers_are_those_of_the_definitions_and_equal_on_both_ranks(result: dict[str, Any]) -> None:
    count, wrong = result["parameters"]
    assert count > 200
    assert wrong == {}
    missing, off = result["inside"]
    assert missing == []
    assert off < 1e-4
    assert result["ranks_agree"]


@of("bits_ddp", "bits_fsdp2", "bits_fsdp2_bf16")
def test_a_watched_run_is_bit_identical(result: dict[str, Any]) -> None:
    assert result == {"bits": [True, True], "rows": True}


@of("watched_fsdp")
def test_a_watched_run_under_fsdp1_is_the_run_unwatched_and_has_the_numbers_of_ddp(result: dict[str, Any]) -> None:
    assert result["apart"] == 0.0
    assert result["freed"] == [True]
    assert len(result["held"]) == 1  # shards alone in an open window too
    assert result["off"] < 1e-3
    assert result["count"] > 80
    assert result["violations"] == 0


@of("late_in_every_training_step_ddp", "late_in_every_batch_fsdp2")
def test_the_rank_that_is_late_in_every_step_is_named_and_not_the_one_that_waits(result: dict[str, Any]) -> None:
    stragglers = [evidence for kind, _, evidence in result["events"] if kind == "straggler"]
    assert [evidence["rank"] for evidence in stragglers] == [1]
    assert stragglers[0]["host"]


@of("late_once_fsdp2")
def test_a_slow_step_is_laid_to_the_rank_that_slept(result: dict[str, Any]) -> None:
    ((kind, step, evidence),) = [event for event in result["events"] if event[0] == "slow_step"]
    assert (kind, step, evidence["rank"]) == ("slow_step", 8, 1)


@of("flipped_ddp")
def test_a_flipped_bit_is_found_and_named_with_rank_and_parameter(result: dict[str, Any]) -> None:
    assert result["errors"] == ["", ""]
    steps = [step for step, _ in result["events"]]
    assert steps == [2, 3]  # it is still there at the next check
    for _, evidence in result["events"]:
        assert evidence == {
            "what": "ranks hold different bits",
            "parameter": "gpt.blocks.0.mlp.up.weight",
            "ranks": [1],
        }


@of("flipped_ddp_raises")
def test_both_ranks_end_together(result: dict[str, Any]) -> None:
    assert result["errors"][0] == result["errors"][1] != ""
    assert "parameter gpt.wte.weight, ranks [1]" in result["errors"][0]


@of("flipped_norm_fsdp2")
def test_what_every_rank_holds_whole_under_fsdp2_is_compared_too(result: dict[str, Any]) -> None:
    step, evidence = result["events"][0]
    assert (step, evidence["parameter"], evidence["ranks"]) == (2, "gpt.blocks.1.mlp_norm.weight", [1])


@of("nothing_flipped_fsdp2")
def test_shards_are_not_taken_for_copies_and_ties_hold(result: dict[str, Any]) -> None:
    assert result["violations"] == {"stability/invariant_violations": 0.0}


@of("tokens_and_sources_ddp")
def test_tokens_and_losses_are_those_of_all_ranks(result: dict[str, Any]) -> None:
    for found, expected in result["tokens"]:
        assert found == pytest.approx(expected, rel=1e-9)
    assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-6)
    assert result["shares"] == [1.0, 0.0]


@of("samples_fsdp2")
def test_text_of_a_sharded_model_is_that_of_the_whole_one(result: dict[str, Any]) -> None:
    assert result["written"] == result["whole"]
    assert result["sharded"] == [result["whole"]] * 2
    assert result["texts"] == [["samples/0", 1], ["samples/1", 1], ["samples/0", 2], ["samples/1", 2]]


@of("sums_tensor_parallel")
def test_sums_over_tensor_parallel_shards(result: dict[str, Any]) -> None:
    assert_sums(result)


def test_sums_over_every_placement_on_two_by_two_ranks(tmp_path: Path) -> None:
    names = ["sums_two_by_two"]
    (result,) = run_scenarios(names, tmp_path, processes=4, script="rank_scenarios_monitors.py").values()
    assert "error" not in result, result["error"]
    assert "_StridedShard" in result["placements"]
    assert_sums(result)


def assert_sums(result: dict[str, Any]) -> None:
    for found in result["found"]:
        for row, expected in zip(found, result["expected"], strict=True):
            assert row == pytest.approx(expected, rel=1e-6)
    assert result["sizes"][0] == result["sizes"][1]
