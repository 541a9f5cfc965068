"""Two agents of torchrun, each on a host of its own as far as it knows: what ranks are told, and one that is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from forked import run_ranks
from killed_launch import assert_all_are_gone, assert_it_went_on, kill_one_rank
from launch import SUPPORT, rank_environ
from torchrun import Torchrun

#: By hand, in one and two minutes: ``RANKS_OF_A_HOST=1 pytest tests/distributed/test_two_hosts.py``, or 2.
RANKS = int(os.environ.get("RANKS_OF_A_HOST", "0"))
by_hand = pytest.mark.skipif(not RANKS, reason="takes a minute on two cores: set RANKS_OF_A_HOST=1, or 2")


def test_forked_ranks_are_told_what_torchrun_tells_ranks_on_two_hosts(tmp_path: Path) -> None:
    script = SUPPORT / "told_ranks.py"
    by_fork, by_torchrun = tmp_path / "by_fork", tmp_path / "by_torchrun"
    by_fork.mkdir()
    by_torchrun.mkdir()
    assert run_ranks(4, script, [], rank_environ(), by_fork, 60, hosts=2) == "ended with 0"
    launch = Torchrun([str(script)], 4, 2, rank_environ(), by_torchrun, [by_torchrun / "launch.log"])
    try:
        assert launch.wait(60) == [0, 0]
    finally:
        launch.kill()
    told = _told(by_torchrun)
    assert [(rank["GROUP_RANK"], rank["LOCAL_RANK"]) for rank in told] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert _told(by_fork) == told


def _told(folder: Path) -> list[dict[str, int]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


@by_hand
def test_where_a_rank_is_killed_all_on_both_hosts_are_gone_and_it_is_named(tmp_path: Path) -> None:
    ended = kill_one_rank(tmp_path, 2 * RANKS, "cpu", restarts=0, victim=RANKS, hosts=2)
    assert ended.host == 1, "the first keeps the store at which the hosts meet"
    assert_all_are_gone(ended, RANKS)


@by_hand
def test_where_a_rank_is_killed_both_hosts_start_theirs_again_and_go_on(tmp_path: Path) -> None:
    assert_it_went_on(kill_one_rank(tmp_path, 2 * RANKS, "cpu", restarts=1, victim=RANKS, hosts=2))
