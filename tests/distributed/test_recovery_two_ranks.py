"""Stepping back with two gloo processes: in one go, and started again by the launcher after kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import SUPPORT, of, run_scenarios
from rank_scenarios_recovery import FIRST, STEPS
from recovery_project import BATCH, ids_by_the_ledger

from lit_stable.callbacks.recovery_ledger import FILE, read_ledger

NAMES = ["rescued_ddp", "rescued_fsdp2", "stopped_together"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenarios(NAMES, tmp_path_factory.mktemp("ranks"), script="rank_scenarios_recovery.py")


@of("rescued_ddp", "rescued_fsdp2")
def test_a_nan_on_one_rank_takes_both_back_past_it(result: dict[str, Any]) -> None:
    assert result == {
        "rewinds": [[12, 10, [[40, 56]]], [20, 15, [[88, 104]]]],
        "reads_what_the_ledger_says": True,
        "poison_read": 0,
        "ranks_agree": True,
        "equals_the_clean_run": True,
    }


@of("stopped_together")
def test_both_ranks_stop_with_one_sentence(result: list[str]) -> None:
    assert result[0].startswith("step 12: stop because of not finite")
    assert result[0] == result[1]


def test_a_launcher_that_restarts_takes_it_through_a_rewind_and_a_kill_within_its_load(tmp_path: Path) -> None:
    path = os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    # Or, with gloo, the ranks of a second life look for those of the first, and may wait for ever.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(SUPPORT / "restart_recovery.py"), str(tmp_path)],
        env={**os.environ, **own_store, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "died").exists()
    rewinds = [e for e in read_ledger(tmp_path / FILE) if e.action == "rewind"]
    assert [(e.step, e.done["to"], e.done["dropped"]) for e in rewinds] == [(12, 10, [[40, 56]])]
    read = [_read_last(tmp_path / f"read-{rank}.jsonl") for rank in (0, 1)]
    ids = [first + second for first, second in zip(*read, strict=True)]
    assert ids == ids_by_the_ledger(tmp_path / FILE, 1, STEPS, 2 * BATCH)
    assert FIRST not in [i for step in ids for i in step]
    assert all(weight.isfinite().all() for weight in torch.load(tmp_path / "weights.pt").values())


def _read_last(path: Path) -> list[list[int]]:
    """Of each step what its last try has read."""
    found = dict(json.loads(line) for line in path.read_text().splitlines())
    return [found[step] for step in range(1, STEPS + 1)]
