"""The gradient norm on a mesh of data- and tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_scenarios


def test_the_norm_counts_every_piece_once_on_two_by_two_ranks(tmp_path: Path) -> None:
    names = ["norm_over_two_by_two"]
    (result,) = run_scenarios(names, tmp_path, processes=4, script="rank_scenarios_mesh.py").values()
    assert "error" not in result, result["error"]
    assert "_StridedShard" in result["placements"]
    assert result["norms"] == pytest.approx([result["reference"]] * 4, rel=1e-6)
