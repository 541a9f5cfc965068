from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_stable.callbacks.recovery_ledger import Entry
from lit_stable.callbacks.recovery_standing import logged_factor, relative, standing, targets, times_taken


class Lines(list[Entry]):
    """A ledger, line by line."""

    def add(self, step: int, action: str, branch: int = 0, **done: Any) -> Entry:
        self.append(Entry(len(self) + 1, "run", branch, step, action, done=done))
        return self[-1]

    def save(self, step: int, healthy: bool = True, branch: int = 0) -> None:
        self.add(step, "checkpoint", branch, path=f"step-{step}.ckpt", healthy=healthy)

    def rewind(self, step: int, to: int, branch: int = 0, **done: Any) -> Entry:
        return self.add(step, "rewind", branch, rung=3, to=to, path=f"step-{to}.ckpt", **done)


def lines() -> Lines:
    found = Lines()
    for step, healthy in ((0, True), (10, True), (20, True), (30, False), (40, True)):
        found.save(step, healthy)
    return found


def test_a_rewind_leaves_later_checkpoints_behind_and_is_pending_until_its_branch_has_begun() -> None:
    ledger = lines()
    ledger.rewind(45, to=20)
    now = standing(ledger)
    assert (now.branch, [s.step for s in now.saved], [s.step for s in now.abandoned]) == (1, [0, 10, 20], [30, 40])
    assert now.pending is ledger[-1]
    assert now.latest().step == 20
    ledger.add(20, "begun", 1)
    assert standing(ledger).pending is None
    ledger.save(30, branch=1)
    assert [(s.step, s.healthy) for s in standing(ledger).saved][-2:] == [(20, True), (30, True)]
    assert standing(ledger).latest().step == 30


def test_a_rewinds_window_is_passed_once_also_over_later_resumes() -> None:
    ledger = lines()
    first = ledger.rewind(45, to=20)
    ledger.add(20, "begun", 1)
    second = ledger.rewind(30, to=10, branch=1)
    ledger.add(25, "result", 2, of=3, result="past the window", rewind=first.number)
    assert standing(ledger).to_pass == second
    ledger.add(35, "result", 2, of=3, result="past the window", rewind=second.number)
    assert standing(ledger).to_pass is None


def test_what_rewinds_have_set_adds_up() -> None:
    ledger = lines()
    ledger.rewind(45, to=20, dropped=[[160, 200]], factor=0.5, weight_decay=0.2, reshuffled=[[200, 7]])
    ledger.rewind(50, to=10, branch=1, dropped=[[190, 260]], factor=0.5, dropout=0.1)
    now = standing(ledger)
    assert now.dropped == [(160, 260)]
    assert now.lr_factor == 0.25
    assert (now.override("weight_decay"), now.override("dropout"), now.override("clip")) == (0.2, 0.1, None)
    assert now.reshuffles == [(200, 7)]


def test_what_was_only_logged_changes_nothing() -> None:
    ledger = lines()
    ledger.rewind(45, to=20, acted=False, dropped=[[160, 200]])
    ledger.add(46, "stop", acted=False)
    now = standing(ledger)
    assert (now.branch, now.dropped, now.pending, now.stopped) == (0, [], None, None)
    assert times_taken(ledger, 3, branch=0, step=50) == 0
    assert times_taken(ledger, 3, branch=0, step=50, with_logged=True) == 1, "a dry run is bounded as well"


def test_what_a_dry_run_would_have_made_of_the_rate_is_told_apart_from_what_was_made() -> None:
    ledger = lines()
    ledger.add(41, "lr", rung=2, acted=True, factor=0.5)
    ledger.add(45, "lr", rung=2, acted=False, factor=0.8)
    ledger.rewind(50, to=20, acted=False, factor=0.5)
    assert [logged_factor(ledger, branch=0, step=step) for step in (45, 46, 51)] == pytest.approx([1.0, 0.8, 0.4])


def test_the_end_holds_until_somebody_goes_on() -> None:
    ledger = lines()
    ledger.add(45, "stop", rung=4)
    assert standing(ledger).stopped is ledger[-1]
    ledger.add(45, "go_on")
    assert standing(ledger).stopped is None


def test_budgets_do_not_count_what_a_killed_run_will_come_by_again() -> None:
    ledger = lines()
    ledger.add(42, "lr", rung=2)
    assert times_taken(ledger, 2, branch=0, step=42) == 0, "resumed from step 40, and about to cut anew"
    assert times_taken(ledger, 2, branch=0, step=43) == 1
    assert times_taken(ledger, 2, branch=1, step=11) == 1, "another branch does not give it back"
    ledger.add(50, "go_on")
    assert times_taken(ledger, 2, branch=0, step=60) == 0


def chosen(ledger: Lines, first_bad: int, before: int = 0, named: int | None = None) -> list[int]:
    return [s.step for s in targets(standing(ledger), first_bad, before, named)]


def test_targets_are_healthy_and_from_before_the_trouble_the_newest_with_room_first() -> None:
    assert chosen(lines(), first_bad=45) == [40, 20, 10, 0]
    assert chosen(lines(), first_bad=40) == [20, 10, 0], "a checkpoint holds the updates of its own step"
    assert chosen(lines(), first_bad=45, before=10) == [20, 10, 0, 40]
    assert chosen(lines(), first_bad=45, before=100) == [0, 10, 20, 40], "with room for none: the earliest"


def test_a_named_step_stands_for_itself() -> None:
    assert chosen(lines(), first_bad=45, named=30) == [30]
    assert chosen(lines(), first_bad=45, named=31) == []


def test_when_the_same_window_fails_again_the_rewind_goes_further_back() -> None:
    ledger = lines()
    ledger.rewind(45, to=40, after=5)
    ledger.add(40, "begun", 1)
    assert chosen(ledger, first_bad=50) == [20, 10, 0]
    assert chosen(ledger, first_bad=51) == [40, 20, 10, 0], "well past it: new trouble"
    ledger.rewind(47, to=20, branch=1, after=5)
    ledger.add(20, "begun", 2)
    assert chosen(ledger, first_bad=30) == [10, 0]
    ledger.rewind(30, to=0, branch=2, after=5)
    assert chosen(ledger, first_bad=10) == []


@pytest.mark.parametrize(("path", "kept"), [("run/checkpoints/a.ckpt", "checkpoints/a.ckpt"), ("other/a.ckpt", None)])
def test_paths_below_the_ledger_move_with_it(tmp_path: Path, path: str, kept: str | None) -> None:
    assert relative(tmp_path / "run", tmp_path / path) == (kept or str(tmp_path / path))
