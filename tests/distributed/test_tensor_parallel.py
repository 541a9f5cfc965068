"""Tensor parallelism is the same run: losses, every gradient, every weight, with dropout on; and fp16 on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from rank_scenarios_fp16 import OVERFLOWED
from rank_scenarios_layout import SPLIT_MODELS, leave_alone

SPLIT = [f"split_{model}" for model in SPLIT_MODELS]
NAMES = [
    *SPLIT,
    "norm_inside_the_mlp",
    "compiled_gradients",
    "gradients_that_differ",
    "gradients_of_one_rank",
    "overflow_16_true",
    "overflow_ddp",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    leave_alone(folder)
    return run_scenarios(NAMES, folder, script="rank_scenarios_layout.py")


@of(*SPLIT)
def test_two_tensor_parallel_ranks_that_recompute_are_one_device(result: dict[str, Any]) -> None:
    assert result["steps"] == len(result["rows"]) >= 12
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(result["alone"]), rtol=1e-5, atol=1e-6)
    assert result["weights"] < 1e-5
    assert len(result["gradients"]) >= 15
    assert result["zero"] == []
    assert {name: apart for name, apart in result["gradients"].items() if apart > 1e-5} == {}


@of("split_plain")
def test_the_longest_comparison_of_runs_left_to_themselves_has_twenty_steps(result: dict[str, Any]) -> None:
    assert result["steps"] == 20


@of(*SPLIT)
def test_what_both_ranks_hold_stays_equal_bit_for_bit(result: dict[str, Any]) -> None:
    assert result["copies"]


@of("norm_inside_the_mlp")
def test_a_norm_inside_an_mlp_sees_all_hidden_units(result: dict[str, Any]) -> None:
    assert {"mlp.norm.weight", "mlp.norm.bias", "attention.q_norm.weight", "output", "input"} <= result.keys()
    assert {name: apart for name, apart in result.items() if apart > 1e-5} == {}


@of("compiled_gradients")
def test_compiled_it_has_the_same_gradients_also_of_an_embedding_right_before_a_block(result: dict[str, Any]) -> None:
    assert len(result) >= 30
    assert {name: apart for name, apart in result.items() if apart > 1e-5} == {}


@of("gradients_that_differ")
def test_copies_get_the_mean_of_their_gradients_and_pieces_keep_theirs(result: dict[str, Any]) -> None:
    assert result["bias and weight"] == [[0.5, 0.0], [0.5, 1.0]]
    assert result["whole"] == 4.0


@of("gradients_of_one_rank")
def test_where_one_rank_had_a_gradient_all_step_on_the_mean(result: dict[str, Any]) -> None:
    """Or copies drift apart in silence; what no rank has used is left alone, decay included."""
    means = {"of_one": [1.0, 1.0], "of_both": [3.0, 3.0], "of_none": None}
    assert result["grads"] == {**means, "copy_of_one": [1.0, 1.0], "copy_of_none": None}
    assert result["moved"] == {name: mean is not None for name, mean in result["grads"].items()}
    assert result["alike"]


@of("overflow_16_true", "overflow_ddp")
def test_an_overflow_on_one_rank_stops_the_step_and_halves_the_scale_on_both(result: dict[str, Any]) -> None:
    assert result["ranks"] == [OVERFLOWED] * 2
