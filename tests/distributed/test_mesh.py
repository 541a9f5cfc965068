"""Norms of gradients, and updates, on a mesh of data- and tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import of, run_scenarios

NAMES = ["norm_over_two_by_two", "each_norm_over_two_by_two", "updates_over_two_by_two"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), processes=4, script="rank_scenarios_mesh.py")


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
