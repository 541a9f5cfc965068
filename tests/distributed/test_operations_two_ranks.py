"""Orders, checks of devices, and what is recorded and repeated, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from launch import of, run_scenarios

#: The first makes the process group that the others use.
NAMES = [
    "orders_ddp",
    "orders_fsdp2",
    "devices_that_are_well",
    "a_device_that_multiplies_wrong",
    "a_device_that_sends_wrong",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_operations.py", timeout=150)


@pytest.fixture
def result(results: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    found = results[request.param]
    assert "error" not in found, found["error"]
    return found


@of("orders_ddp", "orders_fsdp2")
def test_an_order_is_carried_out_by_all_ranks_at_one_boundary_and_after_a_resume(result: Any) -> None:
    assert result["alike"]
    assert result["resumed"]
    assert result["ledger"] == [[2, "save"], [3, "lr"]]
    assert result["stopped"] == [4, True]
    # The schedule's own rates fall from step 2 on; from step 4 on they are halved.
    assert result["rates"]["4"] < 0.55 * result["rates"]["3"]


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
