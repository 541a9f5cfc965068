"""Stepping back with two gloo processes: in one go, and started again by the launcher, however a life has ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import SUPPORT, of, run_scenarios

NODES = ["nodes_with_one_folder", "nodes_with_folders_of_their_own"]
RESCUES = ["rescued_ddp", "rescued_fsdp2", "rescued_fsdp", "rescued_fsdp_bf16_mixed", "rescued_fsdp_bf16_true"]
NAMES = [*RESCUES, "stopped_together", "full_disk", *NODES]
DEATHS = int(os.environ.get("RECOVERY_KILLS", "4"))  # RECOVERY_KILLS=100 for the long form
#: What every run of two ranks comes to that reads the poisoned samples, however often it dies.
RESCUED = {
    "rewinds": [[12, [[40, 56]]], [20, [[88, 104]]]],
    "reads_what_the_ledger_says": True,
    "poison_read": 0,
    "ranks_agree": True,
    "equals_the_clean_run": True,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_recovery.py")


@of(*RESCUES)
def test_a_nan_on_one_rank_takes_both_back_past_it(result: dict[str, Any]) -> None:
    assert result.pop("targets") == [10, 15]
    assert result == RESCUED


@of("stopped_together")
def test_both_ranks_stop_with_one_sentence(result: list[str]) -> None:
    assert result[0].startswith("step 12: not finite: ")
    assert result[0] == result[1]


@of("nodes_with_one_folder")
def test_two_nodes_share_one_ledger(result: dict[str, Any]) -> None:
    assert result == {
        "launched": {"devices": 1, "num_nodes": 2},
        "ranks": [[0, 0, 0, 14], [0, 1, 1, 14]],
        "rewinds": [12],
        "lines_once": True,
    }


@of("nodes_with_folders_of_their_own")
def test_nodes_that_do_not_see_the_same_checkpoint_do_not_begin(result: list[str]) -> None:
    assert result[0] == result[1]
    assert re.search(r"rank 1 on \S+ begins at the start, rank 0 on \S+ with \S+step-2.ckpt", result[0])


@of("full_disk")
def test_a_rewind_that_rank_0_cannot_write_down_is_made_on_no_rank(result: dict[str, Any]) -> None:
    first, second = result["said"]
    assert first == second
    assert "recovery.jsonl cannot be written" in first
    assert result["written"] == []


def test_a_launcher_takes_it_through_rewinds_kills_sigterm_and_a_stuck_rank(tmp_path: Path) -> None:
    path = os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "restart_recovery.py"), str(tmp_path), str(DEATHS), "1"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300 + 30 * DEATHS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    kinds = [kind for kind, _ in found["deaths"]]
    assert sorted(set(kinds)) == ["kill", "load", "stuck", "term"]
    assert len(kinds) >= DEATHS
    for run in found["runs"]:
        first, second = run.pop("targets")
        assert first == 10
        assert 15 <= second < 19, "where SIGTERM had it save, if that was nearer"
    assert found["runs"] == [RESCUED] * len(found["runs"])
    stacks = [file.read_text() for file in tmp_path.glob("run-1/hang-rank*.txt")]
    assert any("in stand_still" in text for text in stacks), "the watchdog has written where the stuck rank stood"
