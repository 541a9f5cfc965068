"""Overrides and resets with two gloo processes: the same rates on every rank, and bit-equal resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios_lr import STEPS, both
from tiny_gpt_run import fit

NAMES = [
    "reset_of_a_shard_is_judged_by_all_ranks",  # first: it needs no folder that ranks agree on
    "override_and_reset_ddp",
    "override_and_reset_fsdp2",
    "dummy_step_of_the_state_getter",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_lr.py")


@of("override_and_reset_ddp", "override_and_reset_fsdp2")
def test_rates_are_exact_and_any_resume_is_bit_equal(result: dict[str, Any]) -> None:
    assert result["rates"]
    assert set(result["equal"].values()) == {True}, result["equal"]
    assert result["counts"] == [3]  # steps 3, 4 and 5 since the reset


@of("override_and_reset_fsdp2")
def test_one_rank_goes_on_within_the_hold_of_two(result: dict[str, Any]) -> None:
    alone = fit("fsdp2", steps=STEPS, callbacks=both(), ckpt_path=result["checkpoint"])
    torch.testing.assert_close(
        torch.tensor(alone.rows), torch.tensor(result["rows"][-len(alone.rows) :]), rtol=1e-4, atol=1e-5
    )
    assert {int(state["step"]) for state in alone.trainer.optimizers[0].state.values()} == {3}


@of("dummy_step_of_the_state_getter")
def test_a_save_or_load_of_stateless_shards_moves_no_weight(result: dict[str, Any]) -> None:
    assert result["equal"] == [True, True]
    assert result["rates"] == [[0.2]]


@of("reset_of_a_shard_is_judged_by_all_ranks")
def test_moments_left_on_one_rank_stop_both(result: dict[str, Any]) -> None:
    assert all("is not zero after the reset" in message for message in result["messages"])
