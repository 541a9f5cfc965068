"""What takes four ranks: their meshes, other numbers of ranks on the way, a rank that is killed.

With fewer than four devices each carries two ranks, as two hosts; see ``torchrun.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from killed_launch import assert_all_are_gone, assert_it_went_on, kill_one_rank
from launch import of, run_scenarios
from world_legs import run_legs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),
]

MESHES = ["straight_tensor", "straight_copies", "straight_copies_by_tensor", "resume_tensor"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_scenarios(MESHES, folder, accelerator="gpu", processes=4, script="rank_scenarios_mesh.py")


@of("straight_tensor", "straight_copies_by_tensor")
def test_two_by_two_gpus_are_four_in_a_row_within_the_kernels_noise(
    result: dict[str, Any], results: dict[str, Any]
) -> None:
    row = results["straight_copies"]
    torch.testing.assert_close(torch.tensor(result["rows"]), torch.tensor(row["rows"]), rtol=1e-3, atol=1e-4)
    assert result["copies"], "what several ranks hold has drifted apart"


@of("resume_tensor")
def test_two_by_two_gpus_resume(result: dict[str, Any]) -> None:
    assert result["rows"]


def test_four_two_four_gpus_are_one_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    legs = run_legs(tmp_path_factory.mktemp("world"), "gpu")
    rows = [row for name in ("first", "second", "third") for row in legs[name]["rows"]]
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(legs["whole"]["rows"]), rtol=2e-2, atol=1e-2)
    for before, after in (("first", "second"), ("second", "third")):
        assert legs[before]["end"] == legs[after]["start"], "codes and maxima are those that were saved, to the bit"


def test_where_one_of_four_is_killed_all_are_gone_and_it_is_named(tmp_path: Path) -> None:
    assert_all_are_gone(kill_one_rank(tmp_path, 4, "gpu", restarts=0, victim=2), 2)


def test_where_one_of_four_is_killed_a_launcher_that_restarts_goes_on(tmp_path: Path) -> None:
    assert_it_went_on(kill_one_rank(tmp_path, 4, "gpu", restarts=1, victim=2))
