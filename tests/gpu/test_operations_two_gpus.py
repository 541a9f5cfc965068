"""Stepping back and orders on two CUDA devices: the scenarios of the CPU, on NCCL."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from launch import of, run_scenarios

from lit_stable.callbacks.event_ring import LAG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

_SLOW = re.compile(r"bad: rank [01], .*: its \S.*: \S+ (TFLOP|GB)/s, where the median of devices like it is \S+")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for subject, names in SCENARIOS.items():
        script = f"rank_scenarios_{subject}.py"
        found |= run_scenarios(names, tmp_path_factory.mktemp(subject), accelerator="gpu", script=script)
    return found


RESCUES = ["rescued_ddp", "rescued_fsdp2", "rescued_fsdp", "rescued_fsdp_bf16_mixed", "rescued_fsdp_bf16_true"]
SCENARIOS = {
    "recovery": [*RESCUES, "stopped_together"],
    "operations": ["orders_ddp", "orders_fsdp2", "repeat_check_fsdp2", "devices_that_are_well"],
}


@pytest.fixture
def result(results: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    found = results[request.param]
    assert not isinstance(found, dict) or "error" not in found, found["error"]
    return found


@of(*RESCUES)
def test_a_nan_on_one_rank_takes_both_back_past_it(result: dict[str, Any]) -> None:
    assert result.pop("targets")[0] == 10
    assert result.pop("rewinds")[0][0] == 12 + LAG
    assert result == {
        "reads_what_the_ledger_says": True,
        "poison_read": 0,
        "ranks_agree": True,
        "equals_the_clean_run": True,
    }


@of("stopped_together")
def test_both_ranks_stop_with_one_sentence(result: list[str]) -> None:
    assert "not finite: " in result[0]
    assert result[0] == result[1]


@of("orders_ddp", "orders_fsdp2")
def test_an_order_is_carried_out_by_all_ranks_at_one_boundary(result: dict[str, Any]) -> None:
    assert result["alike"]
    assert result["ledger"] == [[2, "save"], [3, "lr"]]
    assert result["stopped"] == [4, True]


@of("repeat_check_fsdp2")
def test_repeated_passes_are_equal_within_their_noise(result: dict[str, Any]) -> None:
    assert result["mismatches"] == 0.0


@of("devices_that_are_well")
def test_sound_devices_have_a_row_each_and_are_called_nothing_worse_than_slow(result: dict[str, Any]) -> None:
    table, _, said = result["page"].strip().partition("\n\n")
    _, *rows = [re.split(" {2,}", line) for line in table.splitlines()]
    names = [row[0].split(", ") for row in rows]
    assert [(name[0], name[-1]) for name in names] == [("rank 0", "cuda:0"), ("rank 1", "cuda:1")]
    assert all(len(row) == 5 and all(0 < float(speed) < math.inf for speed in row[2:]) for row in rows)
    # Slow is what a card is that somebody else computes on at the same time.
    is_slow = all(_SLOW.fullmatch(line) for line in said.splitlines())
    assert (result["code"], said) == (0, "2 devices, all well") or (result["code"] == 1 and is_slow)
