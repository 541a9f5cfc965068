"""What needs two CUDA devices: the scenarios of the CPU, on NCCL, and FSDP1, which has no CPU path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios import RESUMED_STEPS
from tiny_gpt_run import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NAMES = [
    "straight_ddp",
    "straight_fsdp2",
    "straight_fsdp",
    "resume_ddp",
    "resume_fsdp2",
    "resume_fsdp2_bf16",
    "resume_fsdp2_full",
    "resume_fsdp",
    "sharded_checkpoint_for_one_rank",
    "nan_on_one_rank",
    "norm_of_a_mix",
    "stop_on_one_ranks_signal",
    "stop_on_one_ranks_notice",
    "damaged_shard",
    "compiled_blocks",  # these two last: they take longest, and what came before counts even if time runs out
    "compiled_fsdp1",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), accelerator="gpu")


@pytest.fixture(scope="module")
def alone() -> Any:
    return fit(accelerator="gpu", bias=True, qk_norm="rmsnorm", embed_norm=True)


@of("straight_ddp", "straight_fsdp2", "straight_fsdp")
def test_two_gpus_agree_with_one(result: dict[str, Any], alone: Any) -> None:
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-3, atol=1e-4)


@of("sharded_checkpoint_for_one_rank")
def test_a_checkpoint_of_two_gpus_goes_on_with_one(result: dict[str, Any]) -> None:
    resumed = fit("fsdp2", steps=RESUMED_STEPS, accelerator="gpu", ckpt_path=result["checkpoint"])
    torch.testing.assert_close(torch.tensor(resumed.rows), torch.tensor(result["rows"][2:]), rtol=1e-3, atol=1e-4)


@of("stop_on_one_ranks_signal")
def test_a_signal_on_one_rank_stops_both_at_one_step(result: dict[str, Any]) -> None:
    assert result == {"steps": [[3, 15], [3, 15]], "files": ["stopped-step=3.ckpt"]}


@of("stop_on_one_ranks_notice")
def test_a_notice_on_one_rank_stops_both_likewise(result: dict[str, Any]) -> None:
    assert result == {"steps": [[3, 10], [3, 10]], "files": ["stopped-step=3.ckpt"]}


@of("resume_ddp", "resume_fsdp2", "resume_fsdp2_bf16", "resume_fsdp2_full", "resume_fsdp")
def test_saving_and_resuming_stay_within_the_kernels_noise(result: dict[str, Any]) -> None:
    assert result["saving_changes"] < 2e-3  # attention's backward pass sums in no fixed order
    for point, (_, _, count, apart) in result["resumed"].items():
        assert apart < 2e-3, f"resumed from micro-batch {point}"
        assert count == RESUMED_STEPS - int(point) // 2


@of("nan_on_one_rank")
def test_a_nan_on_one_rank_stops_the_step_on_both(result: dict[str, Any]) -> None:
    assert result == {"skipped": 1, "unchanged": [True, True], "counts": [3, 3]}


@of("norm_of_a_mix")
def test_the_norm_counts_plain_and_sharded_gradients_once(result: dict[str, Any]) -> None:
    assert result["norm"] == pytest.approx(result["reference"], rel=1e-5)
    assert result["agree"]


@of("damaged_shard")
def test_a_damaged_shard_is_refused_by_name(result: dict[str, Any]) -> None:
    assert result["victim"] in result["message"]


@of("compiled_blocks")
def test_compiled_blocks_train_the_same(result: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(result["compiled"]), torch.tensor(result["plain"]), rtol=2e-3, atol=1e-3)
    assert result["frames"]["ok"] == result["frames"]["total"]


@of("compiled_fsdp1")
def test_compiled_under_fsdp1_it_trains_the_same(result: dict[str, Any]) -> None:
    losses = [torch.tensor([row[1] for row in result[how]]) for how in ("compiled", "plain")]
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.02)
