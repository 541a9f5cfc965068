"""A run that steps back is killed at random moments and comes to the very weights of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
KILLS = int(os.environ.get("RECOVERY_KILLS", "6"))  # RECOVERY_KILLS=100 for the long form


def test_killed_at_random_moments_nothing_is_read_or_dropped_twice(tmp_path: Path) -> None:
    path = os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "kill_recovery.py"), str(tmp_path), str(KILLS), "1"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["deaths"] == KILLS
    assert found["killed"] == found["quiet"]
    assert found["quiet"] == {
        "rewinds": [[12, 10], [15, 10]],
        "dropped_twice": 0,
        "read_twice": 0,
        "reads_what_the_ledger_says": True,
        "poison_read": 0,
        "equals_the_clean_run": True,
    }
