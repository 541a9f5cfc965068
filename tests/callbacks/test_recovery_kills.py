"""A run that steps back is killed at random moments and comes to the very weights of one that was not."""

from __future__ import annotations

import os
from pathlib import Path

from kill_recovery import killed_again_and_again

KILLS = int(os.environ.get("RECOVERY_KILLS", "6"))  # RECOVERY_KILLS=100 for the long form


def test_killed_at_random_moments_nothing_is_read_or_dropped_twice(tmp_path: Path) -> None:
    quiet, killed = killed_again_and_again(tmp_path, KILLS, seed=1)
    assert killed == [quiet] * len(killed)
    assert quiet == {
        "rewinds": [[12, 10], [15, 10]],
        "dropped_twice": 0,
        "read_twice": 0,
        "reads_what_the_ledger_says": True,
        "poison_read": 0,
        "equals_the_clean_run": True,
    }
