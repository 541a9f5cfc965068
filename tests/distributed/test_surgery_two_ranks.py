"""Norms inserted with two gloo processes: as on one, from a file and from a sharded folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios
from surgery_fits import BEFORE, END, NEW, before, operated

NAMES = [
    "file_of_ddp_under_ddp",
    "file_of_ddp_under_fsdp2",
    "folder_under_fsdp2",
    "folder_on_two_by_tensor",
    "begins_with_weights",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_surgery.py")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return operated(before(tmp_path_factory.mktemp("alone")))[0]


@of("file_of_ddp_under_ddp", "file_of_ddp_under_fsdp2", "folder_under_fsdp2")
def test_two_ranks_are_one_and_a_resume_within_the_rise_is_bit_equal(result: dict[str, Any], alone: Any) -> None:
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-4, atol=1e-5)
    assert len(result["rows"]) == END - BEFORE
    for name, weight in alone.weights.items():
        assert result["sums"][name] == pytest.approx(float(weight.double().sum()), abs=1e-3)
    for name, count in result["counts"].items():
        assert count == (0 if any(part in name for part in NEW) else BEFORE)
    assert result["factors"] == [[0.0, 0.25, 0.5, 0.75], [0.5, 0.75]]
    assert result["bits"]
    assert result["still"]
    assert result["left"] == 0
    assert result["agree"]


@of("folder_under_fsdp2")
def test_the_folder_was_one(result: dict[str, Any]) -> None:
    assert result["folder"]


@of("folder_on_two_by_tensor")
def test_norms_are_inserted_into_matrices_that_are_split(result: dict[str, Any], alone: Any) -> None:
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(alone.rows), rtol=1e-4, atol=1e-5)
    for name, weight in alone.weights.items():
        assert result["sums"][name] == pytest.approx(float(weight.double().sum()), abs=1e-3)
    for name, count in result["counts"].items():
        assert count == (0 if any(part in name for part in NEW) else BEFORE)
    assert result["factors"] == [0.0, 0.25, 0.5, 0.75]
    assert result["copies"]


@of("begins_with_weights")
def test_a_new_run_begins_with_the_weights_of_any_layout(result: dict[str, Any]) -> None:
    assert result["equal"] == dict.fromkeys(["ddp ddp", "ddp fsdp2", "fsdp2 ddp", "fsdp2 fsdp2"], True)
