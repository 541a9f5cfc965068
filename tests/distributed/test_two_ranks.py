"""Two gloo processes on the CPU run the code that shards on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios import RESUMED_STEPS
from tiny_gpt_run import SaveEveryMicroBatch, fit

NAMES = [
    "straight_ddp",
    "straight_fsdp2",
    "straight_fsdp",
    "resume_ddp",
    "resume_fsdp2",
    "resume_fsdp2_bf16",
    "resume_fsdp2_full",
    "sharded_checkpoint_for_one_rank",
    "file_of_one_device",
    "nan_on_one_rank",
    "nan_on_one_rank_fsdp1",
    "norm_of_a_mix",
    "stop_on_one_ranks_signal",
    "stop_on_one_ranks_notice",
    "damaged_shard",
    "compiled_blocks",
    "recomputed_blocks",
    "blocks_gathered_alone",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    alone = fit(steps=4, bias=True, callbacks=(SaveEveryMicroBatch(folder / "one", only=(12,)),))
    torch.save(alone.weights, folder / "one" / "weights.pt")
    return {**run_scenarios(NAMES, folder), "alone": alone.rows}


@of("straight_ddp", "straight_fsdp2")
def test_two_ranks_agree_with_one_process(result: dict[str, Any]) -> None:
    alone = fit(bias=True, qk_norm="rmsnorm", embed_norm=True)
    assert result["ranks"] == [0, 2]
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-5, atol=1e-6)
    assert result["validation"] == pytest.approx(float(alone.trainer.callback_metrics["val/loss"]), rel=1e-5)
    for name, weight in alone.weights.items():
        torch.testing.assert_close(torch.tensor(result["weights"][name]), weight, rtol=1e-4, atol=1e-5)


@of("straight_fsdp")
def test_losses_rates_and_norms_under_fsdp1_are_those_of_one_process(result: dict[str, Any]) -> None:
    alone = fit(bias=True, qk_norm="rmsnorm", embed_norm=True)
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-5, atol=1e-6)


@of("resume_ddp", "resume_fsdp2", "resume_fsdp2_bf16", "resume_fsdp2_full")
def test_saving_changes_nothing_and_resuming_is_bit_equal(result: dict[str, Any]) -> None:
    assert result["saving_changes_nothing"]
    for point, (weights, rows, count, _) in result["resumed"].items():
        assert (weights, rows) == (True, True), f"resumed from micro-batch {point}"
        assert (
            count == RESUMED_STEPS - int(point) // 2
        )  # two micro-batches a step on two ranks; an open window is replayed


@of("sharded_checkpoint_for_one_rank")
def test_a_checkpoint_of_two_ranks_goes_on_with_one(result: dict[str, Any]) -> None:
    alone = fit("fsdp2", steps=RESUMED_STEPS, ckpt_path=result["checkpoint"])
    assert [row[0] for row in alone.rows] == [3, 4]
    torch.testing.assert_close(torch.tensor(alone.rows), torch.tensor(result["rows"][2:]), rtol=1e-5, atol=1e-6)


@of("file_of_one_device")
def test_a_file_of_one_device_goes_on_with_two_ranks(result: dict[str, Any], results: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(results["alone"][3:]), rtol=1e-5, atol=1e-6)
    assert result["difference"] < 1e-5


@of("nan_on_one_rank", "nan_on_one_rank_fsdp1")
def test_a_nan_on_one_rank_stops_the_step_on_both(result: dict[str, Any]) -> None:
    assert result == {"skipped": 1, "unchanged": [True, True], "counts": [3, 3]}


@of("norm_of_a_mix")
def test_the_norm_counts_plain_and_sharded_gradients_once(result: dict[str, Any]) -> None:
    assert result["kinds"] == ["DTensor", "Parameter"]
    assert result["norm"] == pytest.approx(result["reference"], rel=1e-6)
    assert result["agree"]


@of("stop_on_one_ranks_signal")
def test_a_signal_on_one_rank_stops_both_at_one_step(result: dict[str, Any]) -> None:
    assert result == {"steps": [[3, 15], [3, 15]], "files": ["stopped-step=3.ckpt"]}


@of("stop_on_one_ranks_notice")
def test_a_notice_on_one_rank_stops_both_likewise(result: dict[str, Any]) -> None:
    assert result == {"steps": [[3, 10], [3, 10]], "files": ["stopped-step=3.ckpt"]}


@of("damaged_shard")
def test_a_damaged_shard_is_refused_by_name(result: dict[str, Any]) -> None:
    assert result["victim"] in result["message"]
    assert f"resume from {result['alternative']}" in result["message"]


@of("compiled_blocks")
def test_compiled_blocks_train_the_same_and_compile_once(result: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(result["compiled"]), torch.tensor(result["plain"]), rtol=1e-4, atol=1e-5)
    assert result["frames"]["ok"] == result["frames"]["total"]


@of("recomputed_blocks")
def test_recomputing_blocks_changes_no_bit(result: dict[str, Any]) -> None:
    assert result["difference"] == 0.0


@of("blocks_gathered_alone")
def test_which_blocks_are_gathered_together_and_how_often_changes_no_bit(result: dict[str, Any]) -> None:
    assert result["units"] == [2, 4]  # the root, and all three blocks or each
    assert result["difference"] == 0.0
