"""Ranks in two dimensions: four gloo processes as data-parallel x tensor-parallel and as copies x shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios_fp16 import OVERFLOWED
from rank_scenarios_layout import STRAIGHT, State
from tiny_gpt_run import GLOBAL_BATCH, LENGTH, SaveEveryMicroBatch, fit

NAMES = [
    "norm_over_two_by_two",
    "each_norm_over_two_by_two",
    "updates_over_two_by_two",
    "straight_tensor",
    "straight_copies",
    "straight_copies_by_tensor",
    "predivided_tensor",
    "predivided_copies",
    "resume_tensor",
    "resume_copies",
    "resume_copies_by_tensor",
    "one_file_on_another_mesh",
    "file_of_one_device",
    "overflow_tensor",
    "overflow_tensor_16_true",
    "overflow_copies",
    "overflow_copies_16_true",
    "nan_in_one_copy",
    "nan_and_signal_on_one_rank",
]
#: (data-parallel rank, data-parallel size) of the four ranks.
PLACES = {
    "straight_tensor": [[0, 2], [0, 2], [1, 2], [1, 2]],
    "straight_copies": [[0, 4], [1, 4], [2, 4], [3, 4]],
    "straight_copies_by_tensor": [[0, 2], [0, 2], [1, 2], [1, 2]],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    alone = fit(callbacks=(SaveEveryMicroBatch(folder / "one", only=(4,)),), **STRAIGHT)
    torch.save(alone.weights, folder / "one" / "weights.pt")
    found = run_scenarios(NAMES, folder, processes=4, script="rank_scenarios_mesh.py")
    for name, result in found.items():
        result["scenario"] = name
    return {**found, "alone": alone}


@of("norm_over_two_by_two")
def test_the_norm_counts_every_piece_once_on_two_by_two_ranks(result: dict[str, Any]) -> None:
    assert "_StridedShard" in result["placements"]
    assert result["norms"] == pytest.approx([result["reference"]] * 4, rel=1e-6)


@of("each_norm_over_two_by_two")
def test_each_norm_is_that_of_the_gathered_gradient_and_one_collective_per_group_of_ranks(
    result: dict[str, Any],
) -> None:
    for kind, reference in result["reference"].items():
        assert result["found"][kind] == [result["found"][kind][0]] * 4
        assert result["found"][kind][0] == pytest.approx(reference, rel=1e-6)
    assert result["groups"] == 2  # data parallel and tensor parallel


@of("updates_over_two_by_two")
def test_updates_are_clipped_on_shards_as_on_whole_tensors(result: dict[str, Any]) -> None:
    assert 5 < result["clipped"] < 30
    for of_ranks, alone in result["rms"]:
        assert of_ranks == [of_ranks[0]] * 4
        torch.testing.assert_close(torch.tensor(of_ranks[0]), torch.tensor(alone), rtol=1e-5, atol=0)
    assert result["apart"] < 1e-6


@of("straight_tensor", "straight_copies", "straight_copies_by_tensor")
def test_four_ranks_agree_with_one_process(result: dict[str, Any], results: dict[str, Any]) -> None:
    alone = results["alone"]
    assert result["places"] == PLACES[result["scenario"]]
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-5, atol=1e-6)
    assert result["validation"] == pytest.approx(float(alone.trainer.callback_metrics["val/loss"]), rel=1e-5)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(torch.tensor(result["weights"][name]), weight, rtol=1e-4, atol=1e-5)
    assert result["mark"] == [3, 3 * GLOBAL_BATCH, 3 * GLOBAL_BATCH * LENGTH]
    assert result["copies"], "what ranks hold in common has drifted apart"


@of("predivided_tensor", "predivided_copies")
def test_gradients_divided_before_the_sum_have_the_same_mean(result: dict[str, Any], results: dict[str, Any]) -> None:
    assert result["largest"] > 0  # our reduction was called
    assert result["rows"] == results[result["scenario"].replace("predivided", "straight")]["rows"]


@of("resume_tensor", "resume_copies", "resume_copies_by_tensor")
def test_a_resume_from_inside_a_window_is_bit_equal_with_dropout(result: dict[str, Any]) -> None:
    assert result["bits"]
    assert result["rows"]
    assert result["steps"] == [2, 3]
    samples = 3 * GLOBAL_BATCH * (2 if result["scenario"] == "resume_copies" else 1)
    assert result["marks"] == [[3, samples, samples * LENGTH]] * 2
    assert result["copies"]


@of("one_file_on_another_mesh")
def test_a_file_of_one_mesh_goes_on_with_another(result: dict[str, Any]) -> None:
    assert result["loaded"]
    assert result["difference"] < 1e-5


@of("resume_tensor", "resume_copies", "one_file_on_another_mesh")
def test_one_process_reads_a_checkpoint_of_two_by_two_bit_for_bit(result: dict[str, Any]) -> None:
    state = State()
    strategy = "fsdp2_full" if result["scenario"] == "one_file_on_another_mesh" else "fsdp2"
    run = fit(strategy, ckpt_path=result["checkpoint"], callbacks=(state,), **STRAIGHT)
    assert state.at_start == result["saved"]
    assert [row[0] for row in run.rows] == [2, 3]


@of("file_of_one_device")
def test_a_file_of_one_device_goes_on_with_two_by_two(result: dict[str, Any], results: dict[str, Any]) -> None:
    alone = results["alone"].rows[1:]
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone), rtol=1e-5, atol=1e-6)
    assert result["difference"] < 1e-5


@of("overflow_tensor", "overflow_tensor_16_true", "overflow_copies", "overflow_copies_16_true")
def test_an_overflow_in_one_piece_stops_the_step_and_halves_the_scale_on_all(result: dict[str, Any]) -> None:
    assert result["ranks"] == [OVERFLOWED] * 4


@of("nan_in_one_copy")
def test_a_loss_that_is_nan_on_one_rank_of_one_copy_skips_the_step_on_all(result: dict[str, Any]) -> None:
    norms, skipped, counts = result["ranks"][0]
    assert result["ranks"] == [result["ranks"][0]] * 4
    assert [norm is None for norm in norms] == [False, True, False]
    assert (skipped, counts) == (1, [2])
    assert result["mark"] == [3, 3 * GLOBAL_BATCH, 3 * GLOBAL_BATCH * LENGTH]
    assert result["copies"]


@of("nan_and_signal_on_one_rank")
def test_a_nan_on_one_rank_skips_a_step_and_a_signal_ends_the_run_on_all(result: dict[str, Any]) -> None:
    assert result["ranks"] == [[3, 1, [2], 15]] * 4
    assert result["files"] == ["stopped-step=3.ckpt"]
