"""Two ranks that were started differently, or see different files: both end with one sentence, or train as one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from launch import of, run_scenarios

DIFFER = {
    "learning_rates_that_differ": "model.schedule.peak is 0.02 and 0.01 on rank 0",
    "features_that_differ": r"stability.grad_spike_skip\S* is .* and .* on rank 0",
    "meshes_that_differ": "mesh.reshard_after_forward is False and True on rank 0",
    "code_that_differs": "the code of lit-stable is 'abc1' and 'abc0' on rank 0",
    "data_that_differ": r"data.sources.text \(tokens\) is '\d+ tokens \(\w+\)' and '\d+ tokens \(\w+\)' on rank 0",
    "orders_that_differ": r"data.validation in order is \['a', 'b'\] and \['b', 'a'\] on rank 0",
    "tokenizers_that_differ": r"data.sources.text \(index\) is '\w{8}' and '\w{8}' on rank 0",
}
APART = ["shards_for_a_folder_of_each_host", "rewinds_in_a_folder_of_each_host"]
#: What is said, and micro-batches begun by then, four of which are saved where that is what is refused.
PROJECTS = {
    "a_project_whose_checkpoints_are_apart": (r"kept: rank 1 on \S+ does not see the folder", 0),
    "a_project_whose_meshes_differ": (r"mesh.reshard_after_forward is False and True on rank 0", 0),
    "a_save_whose_shards_are_apart": (
        r"m4.ckpt: __0_0.distcp, __1_0.distcp, meta.pt in it: not seen by every rank",
        4,
    ),
    "a_save_in_the_background_whose_shards_are_apart": (r"m4.ckpt: rank 1 on \S+ does not see the folder", 4),
}
NAMES = [
    *("copies_of_one_recipe_and_its_data", *DIFFER, "data_that_are_damaged"),
    *(*APART, "one_file_for_a_folder_of_each_host", *PROJECTS),
    *("strategies_that_differ", "a_folder_that_one_rank_may_not_look_into", "checkpoints_of_each_host"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_agreement.py", timeout=150)


@of("copies_of_one_recipe_and_its_data")
def test_where_a_host_keeps_its_copy_of_the_data_is_its_own_business(result: dict[str, Any]) -> None:
    assert result["codes"] == [0, 0], result["said"]
    assert result["left"] == ["runs/tiny/0001"]


@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_were_started_differently_do_not_begin(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["codes"] == [2, 2]
    assert result["said"][0] == result["said"][1]
    assert re.search(rf"rank 1 on \S+, unlike rank 0 on \S+: {DIFFER[name]}", result["said"][0]), result["said"][0]
    assert result["left"] == []


@of("data_that_are_damaged")
def test_where_one_host_cannot_read_its_data_the_others_do_not_wait(result: dict[str, Any]) -> None:
    assert result["codes"] == [2, 2]
    other, own = result["said"]
    assert "documents.bin" in own
    assert re.search(r"rank 1 on \S+: .*documents.bin", other), other


@of(*APART)
def test_hosts_that_do_not_share_the_folder_of_the_run_do_not_begin(result: dict[str, Any]) -> None:
    assert result["codes"] == [2, 2]
    assert result["said"][0] == result["said"][1]
    assert re.search(r"runs/tiny: rank 1 on \S+ does not see the folder that rank 0 sees", result["said"][0])
    assert result["left"] == []


@of("one_file_for_a_folder_of_each_host")
def test_where_rank_0_alone_writes_the_others_are_told(result: dict[str, Any]) -> None:
    assert result["codes"] == [0, 0]
    assert re.search(r"runs/tiny: rank 1 on \S+ does not see it", result["said"][0])
    assert result["left"] == ["host-0/runs/tiny/0001"]


@of("checkpoints_of_each_host")
def test_hosts_go_on_from_copies_of_one_checkpoint_alone(result: dict[str, Any]) -> None:
    assert result["codes"] == [[0, 2, 0, 2]] * 2, result["said"]
    assert re.search(r"rank 1 on \S+ begins at the start, rank 0 on \S+ with runs/tiny/0001/\S+", result["said"][1])
    assert re.search(r"step-00000003.ckpt: is another checkpoint for rank 1 on \S+ than for rank 0", result["said"][3])


@of("strategies_that_differ")
def test_ranks_with_other_strategies_do_not_wait_for_each_other(result: dict[str, Any]) -> None:
    assert result["codes"] == [2, 2]
    assert re.search(
        r"rank 1 on \S+ begins with strategy DDPStrategy, rank 0 on \S+ with strategy FSDP2Strategy", result["said"][0]
    )


@of("a_folder_that_one_rank_may_not_look_into")
def test_a_rank_that_may_not_look_is_one_that_does_not_see(result: list[str]) -> None:
    assert result[0] == result[1]
    assert result[0].startswith("rank 1 on ")


@pytest.mark.parametrize("name", PROJECTS)
def test_no_checkpoint_of_a_project_passes_for_whole_without_the_shards_of_a_host(
    results: dict[str, Any], name: str
) -> None:
    result, (sentence, begun) = results[name], PROJECTS[name]
    assert "error" not in result, result["error"]
    assert result["said"][0].replace("host-0", "host-1") == result["said"][1].replace("host-0", "host-1")
    assert re.search(sentence, result["said"][0]), result["said"][0]
    assert result["left"] == [[], []]
    assert result["steps"] >= begun if begun else result["steps"] == 0
