"""Clipping by parts and by updates with two gloo processes: as one process does, and alike on both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios_clip import STEPS, run
from tiny_gpt_run import fit

BOTH = of("parts_ddp", "parts_fsdp2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = ["parts_ddp", "parts_fsdp2"]
    return run_scenarios(names, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_clip.py")


@pytest.fixture(scope="module")
def alone() -> Any:
    return run(fit)


@BOTH
def test_norms_of_tensors_are_those_of_the_gathered_gradients(result: dict[str, Any]) -> None:
    assert len(result["norms"]) == STEPS
    for found, reference in zip(result["norms"], result["whole_norms"], strict=True):
        assert found == pytest.approx(reference, rel=1e-6)


@BOTH
def test_two_ranks_learn_and_clip_as_one_process_does(result: dict[str, Any], alone: Any) -> None:
    straight, rows = alone
    for fraction in ("clip_frac", "update_clip_frac"):
        assert any(0 < logged[fraction] < 1 for _, logged in rows.rows)
    for two, one in zip(result["rows"], rows.rows, strict=True):
        assert two[0].keys() == one[0].keys()  # the names of an unsharded run
        for name, values in one[0].items():
            assert two[0][name] == pytest.approx(values, rel=2e-5), name
        assert two[1] == pytest.approx(one[1], rel=1e-4)
    for name, weight in straight.weights.items():
        torch.testing.assert_close(torch.tensor(result["weights"][name]), weight, rtol=1e-5, atol=1e-6)


@BOTH
def test_ranks_decide_alike_and_a_nan_in_one_shard_skips_the_step_and_enters_nothing(result: dict[str, Any]) -> None:
    assert result["ranks_agree"] == [True, True]
    assert result["skipped"] == [1, 1]
    assert result["learned_by_then"] == [True, False]


@BOTH
def test_saving_changes_nothing_and_resuming_is_bit_equal(result: dict[str, Any]) -> None:
    assert result["saving_changes_nothing"]
    assert result["resumed"] == [True, True]


@of("parts_fsdp2")
def test_what_two_ranks_learned_of_their_shards_goes_on_with_one(result: dict[str, Any]) -> None:
    _, rows = run(fit, strategy="fsdp2", ckpt_path=result["checkpoint"])
    assert len(rows.rows) == STEPS - 2
    for one, two in zip(rows.rows, result["rows"][2:], strict=True):
        for name, values in two[0].items():
            assert one[0][name] == pytest.approx(values, rel=2e-5), name
