"""Queries and keys are scaled alike whether their rows are whole, sharded, or split by heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import run_scenarios
from rank_scenarios_qk import OPTIONS, THRESHOLD
from tiny_gpt_run import fit

from lit_stable.callbacks import QKClip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = ["qk_clip_ddp", "qk_clip_fsdp2", "qk_clip_tensor_parallel", "qk_clip_skips_fsdp2"]
    found = run_scenarios(names, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_qk.py")
    for name, value in found.items():
        assert "error" not in value, (name, value["error"])
    return found


def assert_near(found: dict[str, Any], weights: dict[str, Any]) -> None:
    for name, weight in weights.items():
        torch.testing.assert_close(torch.tensor(found["weights"][name]), torch.as_tensor(weight), rtol=1e-3, atol=1e-5)


def test_sharded_rows_are_scaled_as_whole_ones(results: dict[str, Any]) -> None:
    ddp, fsdp2 = results["qk_clip_ddp"], results["qk_clip_fsdp2"]
    assert ddp["clipped"] == fsdp2["clipped"] > 0
    assert fsdp2["largest"] == pytest.approx(ddp["largest"], rel=1e-3)
    assert_near(fsdp2, ddp["weights"])


def test_heads_on_two_devices_are_scaled_as_on_one(results: dict[str, Any]) -> None:
    alone = fit(callbacks=(QKClip(THRESHOLD),), **OPTIONS)
    assert results["qk_clip_tensor_parallel"]["clipped"] > 0
    assert_near(results["qk_clip_tensor_parallel"], alone.weights)


def test_sharded_rows_stand_still_in_a_skipped_step(results: dict[str, Any]) -> None:
    assert results["qk_clip_skips_fsdp2"] == [2, 4]  # the first has rate 0


def test_it_has_an_effect_that_these_would_miss_otherwise(results: dict[str, Any]) -> None:
    without = fit(**OPTIONS)
    with pytest.raises(AssertionError):
        assert_near(results["qk_clip_tensor_parallel"], without.weights)
