"""Freezing with two gloo processes: exact under DDP and FSDP2, and every checkpoint loads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios_freeze import RULES, STEPS, WINDOW, fit_sharded
from tiny_gpt_run import fit
from tiny_vlm_run import FROZEN, PairData, vlm_module

from lit_stable.callbacks import LayerNormFreeze

NAMES = [
    "largest_element",  # first: it needs no folder that ranks share before they know each other
    "norms_window_ddp",
    "norms_window_fsdp2",
    "backbone_ddp",
    "backbone_fsdp2",
    "backbone_fsdp2_full",
    "stock_strategy_sharded",
    "stock_strategy_full",
    "vlm_fsdp2",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_freeze.py")


def is_norm(name: str) -> bool:
    return "norm" in name  # in this GPT the names do tell


@of("norms_window_ddp", "norms_window_fsdp2")
def test_norms_stand_still_in_their_window_and_ranks_agree_after_it(result: dict[str, Any]) -> None:
    for name, moved in result["moved"].items():
        assert moved == [False, True, *([False, False] if is_norm(name) else [True, True]), True], name
    assert result["ranks_agree"]
    alone = fit(steps=STEPS, callbacks=(LayerNormFreeze(WINDOW),))
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-5, atol=1e-6)


@of("backbone_ddp", "backbone_fsdp2", "backbone_fsdp2_full")
def test_a_frozen_backbones_norms_are_set_free_and_ranks_agree(result: dict[str, Any]) -> None:
    for name, moved in result["moved"].items():
        frozen = name.startswith("gpt.blocks")
        free_after = 1 if not frozen else 3 if is_norm(name) else 5
        assert moved == [step >= free_after for step in range(5)], name
    assert result["ranks_agree"]


@of("norms_window_ddp", "norms_window_fsdp2", "backbone_ddp", "backbone_fsdp2", "backbone_fsdp2_full")
def test_resumes_bit_for_bit_also_from_what_a_resumed_run_saved(result: dict[str, Any]) -> None:
    assert result["resumed"] == [True, True, True]


@of("backbone_fsdp2", "backbone_fsdp2_full")
def test_a_checkpoint_of_two_ranks_goes_on_with_one(result: dict[str, Any]) -> None:
    alone = fit("fsdp2", steps=STEPS, ckpt_path=result["checkpoint"], callbacks=(LayerNormFreeze(RULES),))
    torch.testing.assert_close(torch.tensor(alone.rows), torch.tensor(result["rows"][2:]), rtol=1e-5, atol=1e-6)


@of("stock_strategy_sharded", "stock_strategy_full")
def test_what_is_frozen_for_good_may_stand_in_the_optimizer(result: dict[str, Any]) -> None:
    assert result["moved"] == {
        "net.0.weight": [False] * 4,
        "net.0.bias": [False] * 4,
        "net.1.weight": [False, False, False, True],
        "net.1.bias": [False, False, False, True],
        "net.3.weight": [True] * 4,
        "net.3.bias": [True] * 4,
    }
    assert result["resumed"] == [True, True]
    assert sorted(result["counts"]) == [0, 0, 1, 1, 4, 4]


@of("stock_strategy_sharded")
def test_its_checkpoint_of_two_ranks_goes_on_with_one(result: dict[str, Any]) -> None:
    _, weights = fit_sharded(1, resume=result["checkpoint"])
    for name, weight in weights.items():
        torch.testing.assert_close(weight, torch.tensor(result["weights"][name]), rtol=1e-5, atol=1e-6)


@of("vlm_fsdp2")
def test_new_blocks_between_frozen_layers_train_as_on_one_rank_and_resume_bit_for_bit(result: dict[str, Any]) -> None:
    def first_step(name: str) -> int:
        if not name.startswith("sight.blocks"):
            return 3 if name.startswith("gpt") and is_norm(name) else STEPS
        # The rate of step 0 is 0. In step 1 gates are still shut: matrices decay, and only gates have a gradient.
        return 1 if "gate" in name or not (is_norm(name) or name.endswith("bias")) else 2

    for name, moved in result["moved"].items():
        assert moved == [step >= first_step(name) for step in range(STEPS)], name
    assert result["ranks_agree"]
    assert result["resumed"]
    options = {"module": vlm_module(qk_norm="rmsnorm"), "data": PairData(), "callbacks": (LayerNormFreeze(FROZEN),)}
    alone = fit(steps=STEPS, **options)
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-5, atol=1e-6)


@of("largest_element")
def test_the_inf_norm_over_shards_is_the_largest_element_and_sees_a_nan_on_either_rank(result: dict[str, Any]) -> None:
    assert result["norm"] == pytest.approx(result["reference"], rel=1e-6)
    assert result["with_nan"] == [[[math.inf], [math.inf]]] * 2
