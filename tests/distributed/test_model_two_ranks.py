"""Model and optimizer options, and the reduction of gradients, with two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios_model import module
from tiny_gpt_run import fit

NAMES = [
    "agrees_one_fsdp2",
    "agrees_two_fsdp2",
    "agrees_one_ddp",
    "resumes_one",
    "resumes_two",
    "sgd_without_state",
    "predivided_ddp",
    "predivided_fsdp2",
    "gradients_of_40000_in_fp16",
    "summands_of_4000_in_fp16_shards",
    "norms_in_bf16_mixed",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_model.py")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: fit(steps=4, module=module(name)) for name in ("one", "two")}


def assert_agree(result: dict[str, Any], single: Any) -> None:
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(single.rows), rtol=1e-4, atol=1e-5)
    for name, weight in single.weights.items():
        torch.testing.assert_close(torch.tensor(result["weights"][name]), weight, rtol=1e-3, atol=1e-4)


@of("agrees_one_fsdp2", "agrees_one_ddp")
def test_two_ranks_agree_with_one_process(result: dict[str, Any], alone: dict[str, Any]) -> None:
    assert_agree(result, alone["one"])


@of("agrees_two_fsdp2")
def test_two_ranks_agree_with_one_process_in_the_other_model(result: dict[str, Any], alone: dict[str, Any]) -> None:
    assert_agree(result, alone["two"])


@of("resumes_one", "resumes_two")
def test_resuming_in_bf16_is_bit_equal(result: dict[str, Any]) -> None:
    assert result == {"equal": True, "dtypes": ["torch.float32"]}


@of("sgd_without_state")
def test_an_optimizer_without_state_saves_and_resumes(result: dict[str, Any]) -> None:
    assert result["equal"] == [True, True]


@of("predivided_ddp", "predivided_fsdp2")
def test_predivided_gradients_have_the_same_mean(result: dict[str, Any]) -> None:
    assert result["largest"] > 0  # our reduction was called
    assert result["difference"] == 0


@of("gradients_of_40000_in_fp16")
def test_a_sum_that_fp16_cannot_hold_is_divided_before(result: dict[str, Any]) -> None:
    assert result == {"1.0": float("inf"), "32.0": 40000.0}


@of("summands_of_4000_in_fp16_shards")
def test_shards_too_are_divided_before_a_sum_that_fp16_cannot_hold(result: dict[str, Any]) -> None:
    assert result["means"] == {"1.0": float("inf"), "32.0": 4000.0}
    assert result["contributions"] == [["torch.float16", 4000.0], ["torch.float16", 4000.0 / 32]]


@of("norms_in_bf16_mixed")
def test_norms_are_fp32_under_fsdp2_and_cast_under_fsdp_as_the_docs_say(result: dict[str, Any]) -> None:
    assert result["fsdp2"] == [["torch.float32", "torch.bfloat16"]]
    assert result["fsdp"] == [["torch.bfloat16", "torch.bfloat16"]]
    assert result["stored"] == "torch.float32"
