"""Skipping with two gloo processes: one decision on both, whichever of them has the cause."""

from __future__ import annotations

from typing import Any

import pytest
from launch import run_scenarios
from rank_scenarios_skip import check_spike_and_overflow, spike_scenarios

SPIKES = spike_scenarios("ddp", "fsdp2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = ["bad_loss_ddp", "bad_loss_fsdp2", "bad_shard_resumed_fsdp2", "stop_at_the_cap", "no_loss", *SPIKES]
    folder = tmp_path_factory.mktemp("ranks")
    found = run_scenarios([*names, "no_loss_on_rank_one"], folder, script="rank_scenarios_skip.py")
    return {**found, "folder": folder}


@pytest.mark.parametrize("name", ["bad_loss_ddp", "bad_loss_fsdp2"])
def test_a_bad_loss_on_one_rank_skips_the_step_on_both(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    assert [[step for step, _ in events] for events in result["events"]] == [[5, 7], [5, 7]]
    assert result["events"][0] == result["events"][1]
    assert result["unchanged"] == [[5, 7], [5, 7]]
    assert result["skipped"] == [2, 2]
    assert result["statistics_agree"]
    assert result["told"] == [[5, "skipped_step"], [7, "skipped_step"]]  # by rank 0 alone
    assert result["written"] == ["events.jsonl"]


@pytest.mark.parametrize("name", SPIKES)
def test_a_spike_and_an_overflow_on_one_rank_skip_on_both_and_the_scale_follows_one(
    results: dict[str, Any], name: str
) -> None:
    assert "error" not in results[name], results[name]["error"]
    check_spike_and_overflow(name, results[name])


def test_a_nan_in_one_shard_skips_on_both_and_resumes_bit_for_bit(results: dict[str, Any]) -> None:
    result = results["bad_shard_resumed_fsdp2"]
    assert "error" not in result, result["error"]
    assert result["skipped"] == [1, 1]
    assert result["saving_changes_nothing"]
    assert result["resumed"] == {"6": [True, True], "9": [True, True]}


def test_both_ranks_stop_at_the_cap_and_at_the_same_step(results: dict[str, Any]) -> None:
    result = results["stop_at_the_cap"]
    assert "error" not in result, result["error"]
    assert result["ended"][0] == result["ended"][1]
    assert result["ended"][0].startswith("TooManySkips: ")
    assert result["events"][0] == result["events"][1]
    assert result["events"][0][:3] == [5, 6, 7]
    assert result["unchanged"][0] == result["unchanged"][1]


def test_a_step_without_a_loss_is_refused_on_more_than_one_rank(results: dict[str, Any]) -> None:
    result = results["no_loss"]
    assert "error" not in result, result["error"]
    assert "by returning None in distributed training is not supported" in result["ended"][0]
    assert result["ended"][0] == result["ended"][1]


def test_a_rank_without_a_loss_ends_by_saying_so_and_neither_hangs(results: dict[str, Any]) -> None:
    """Case A2: the others wait for its gradients; nothing of ours may wait for them on its way out."""
    assert "error" in results["no_loss_on_rank_one"]
    assert "were ended after" not in results["no_loss_on_rank_one"]["error"]
    (said,) = results["folder"].glob("*/ended-1")
    assert "Skipping the `training_step` by returning None in distributed training" in said.read_text()
