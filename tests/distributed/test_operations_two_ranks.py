"""Orders, checks of devices, and what is recorded and repeated, on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from launch import of, run_scenarios

#: The first makes the process group that the others use.
NAMES = [
    "orders_ddp",
    "orders_fsdp2",
    "a_surge_that_one_rank_sees",
    "black_box_fsdp2",
    "repeat_check_ddp",
    "repeat_check_fsdp2",
    "devices_that_are_well",
    "a_device_that_multiplies_wrong",
    "a_device_that_sends_wrong",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_operations.py", timeout=150)


@of("orders_ddp", "orders_fsdp2")
def test_an_order_is_carried_out_by_all_ranks_at_one_boundary_and_after_a_resume(result: Any) -> None:
    assert result["alike"]
    assert result["resumed"]
    assert result["ledger"] == [[2, "save"], [3, "lr"]]
    assert result["stopped"] == [4, True]
    # The schedule's own rates fall from step 2 on; from step 4 on they are halved.
    assert result["rates"]["4"] < 0.55 * result["rates"]["3"]


@of("a_surge_that_one_rank_sees")
def test_a_surge_is_told_on_all_ranks_by_what_rank_0_has_logged(result: Any) -> None:
    for steps, *told in result:  # once the others log nothing of it, once numbers of their own
        assert steps == 26
        assert told[0]
        assert told[0] == told[1]


@of("black_box_fsdp2")
def test_each_rank_writes_its_own_record_and_one_writes_alone(result: Any) -> None:
    assert result["same"]
    names = ["step-00000003-alone/rank1.json", "step-00000004-together/rank0.json", "step-00000004-together/rank1.json"]
    assert sorted(result["found"]) == names
    mine, others = (result["found"][name]["steps"] for name in names[1:])
    for row, other, (step, loss, lr, norm) in zip(mine, others, result["rows"][2:4], strict=True):
        assert (row["step"], row["lr"], row["grad_norm"]) == (step, lr, norm)
        assert (row["loss"] + other["loss"]) / 2 == pytest.approx(loss, rel=1e-6)
        assert sorted(row["samples"] + other["samples"]) == list(range(8 * (step - 1), 8 * step))
        layers = {k: v for k, v in row.items() if k.startswith("grad_norm/")}
        assert layers == {k: v for k, v in other.items() if k.startswith("grad_norm/")}
        assert math.hypot(*layers.values()) == pytest.approx(norm, rel=1e-5)


@of("repeat_check_ddp")
def test_a_flipped_bit_is_found_and_its_rank_named(result: Any) -> None:
    ((step, kind, evidence), *more) = [event for event in result["events"] if event[1] == "silent_corruption"]
    assert not more
    assert (step, kind, evidence["ranks"], evidence["part"]) == (2, "silent_corruption", [1], "gpt.wte.weight")
    assert result["same"]
    assert result["mismatches"] == 0.0  # in step 3


@of("repeat_check_fsdp2")
def test_sharded_passes_are_equal_and_leave_the_run_as_it_is(result: Any) -> None:
    assert result == {"same": True, "mismatches": 0.0}


@of("devices_that_are_well")
def test_sound_devices_are_called_well(result: Any) -> None:
    assert (result["code"], result["page"].splitlines()[-1]) == (0, "2 devices, all well")


@of("a_device_that_multiplies_wrong")
def test_the_device_that_multiplies_wrong_is_named(result: Any) -> None:
    bad = [line for line in result["page"].splitlines() if line.startswith("bad: ")]
    assert result["code"] == 1
    assert bad
    assert all(line.startswith("bad: rank 1, ") for line in bad)
    assert "products were wrong, in up to 1 elements" in bad[0]


@of("a_device_that_sends_wrong")
def test_the_device_that_sends_wrong_is_named(result: Any) -> None:
    bad = [line for line in result["page"].splitlines() if line.startswith("bad: ")]
    assert result["code"] == 1
    assert [line.partition(": ")[2].partition(", ")[0] for line in bad] == ["rank 1"]
    assert bad[0].endswith("what it sends came wrong on 2 of 2 ranks")
