from __future__ import annotations

import math
from typing import Any

from lit_stable.callbacks.events import Event
from lit_stable.callbacks.recovery_ladder import Decision, Outcome, RecoveryLadder
from lit_stable.callbacks.recovery_rungs import check

RUNGS: list[dict[str, Any]] = [
    {"do": "wait", "steps": 10},
    {"do": "lr", "factor": 0.5, "steps": 10, "cooldown": 30},
    {"do": "rewind", "steps": 10},
    {"do": "stop"},
]
TRIGGERS: dict[str, str | int] = {"spike": "wait", "surge": "lr", "not_finite": 3, "slow_divergence": "wait"}


def ladder(spent: Any = lambda rung: False, acts: bool = True) -> RecoveryLadder:
    return RecoveryLadder(check(RUNGS, TRIGGERS), TRIGGERS, spent, acts)


class Run:
    """Shows a ladder losses, and keeps what it does."""

    def __init__(self, of: RecoveryLadder | None = None, healthy: int = 20) -> None:
        self.ladder = of or ladder()
        self.step = 0
        self.found: list[tuple[int, str, int]] = []
        self.show([3.0] * healthy)

    def show(self, losses: list[float | None], kind: str | None = None, **evidence: Any) -> list[tuple[int, str, int]]:
        """An event, if any, comes with the first; returns (step, what, rung) of what follows from these."""
        before = len(self.found)
        for loss in losses:
            self.step += 1
            events = [] if kind is None else [Event(self.step, kind, evidence)]
            kind = None
            found = self.ladder.observe(self.step, loss, events)
            if isinstance(found, Decision):
                self.found.append((found.step, "take", found.rung))
            elif isinstance(found, Outcome):
                self.found.append((found.step, "over", found.rung))
        return self.found[before:]


def test_a_healthy_run_is_left_alone_and_so_is_an_event_without_a_trigger() -> None:
    run = Run()
    assert run.show([3.0] * 20, "plateau") == []


def test_a_spike_that_comes_back_costs_a_wait() -> None:
    run = Run()
    assert run.show([9.0, 5.0, *[3.0] * 10], "spike") == [(21, "take", 0), (26, "over", 0)]
    assert run.ladder.episode is None


def test_one_that_does_not_climbs_rung_by_rung_each_with_its_patience() -> None:
    run = Run()
    assert run.show([9.0] * 60, "spike") == [(21, "take", 0), (31, "take", 1), (41, "take", 2), (51, "take", 3)]


def test_back_is_within_so_many_deviations_of_the_level_before() -> None:
    near, far = 3.0 + 2.9 * 0.03, 3.0 + 3.1 * 0.03  # the spread's floor is a hundredth of the level
    assert Run().show([9.0, *[near] * 9], "spike")[1:] == [(26, "over", 0)]
    assert Run().show([9.0, *[far] * 9], "spike")[1:] == []


def test_losses_in_trouble_do_not_move_the_level() -> None:
    run = Run()
    run.show([4.0] * 9, "spike")
    assert run.ladder.band.level == 3.0


def test_a_slow_divergence_must_come_back_to_its_best() -> None:
    run = Run()
    assert run.show([3.0] * 11, "slow_divergence", best=2.5, best_step=4.0) == [(21, "take", 0), (31, "take", 1)]
    assert run.ladder.episode is not None
    assert run.ladder.episode.first_bad == 5


def test_an_event_that_begins_higher_leads_there_at_once_and_a_lower_one_does_not_lead_back() -> None:
    run = Run()
    run.show([9.0] * 3, "spike")
    assert run.show([math.nan], "not_finite") == [(24, "take", 2)]
    assert run.show([9.0], "spike") == []


def test_another_event_while_it_watches_means_that_it_is_not_back() -> None:
    run = Run()
    run.show([3.0] * 4, "spike")
    assert run.show([3.0] * 4, "spike") == []
    assert run.show([3.0]) == [(29, "over", 0)], "five since the event, its own step among them"


def test_a_spent_rung_is_passed_over_and_beyond_the_last_is_the_end() -> None:
    assert Run(ladder(lambda rung: rung in (0, 1))).show([9.0], "spike") == [(21, "take", 2)]
    assert Run(ladder(lambda rung: True)).show([9.0], "spike") == [(21, "take", 4)]


def test_within_the_cooldown_there_is_no_second_cut_but_its_patience_runs() -> None:
    run = Run()
    assert run.show([3.0] * 6, "surge") == [(21, "take", 1), (26, "over", 1)]
    assert run.show([9.0] * 12, "surge") == [(37, "take", 2)]
    late = Run()
    late.show([3.0] * 40, "surge")
    assert late.show([9.0], "surge") == [(61, "take", 1)]


def test_what_could_not_be_taken_leads_to_the_next() -> None:
    run = Run()
    found = run.ladder.observe(21, math.nan, [Event(21, "not_finite", {})])
    assert isinstance(found, Decision)
    following = run.ladder.refuse(found)
    assert following is not None
    assert following.rung == 3


def test_steps_without_a_loss_are_passed_over() -> None:
    run = Run()
    assert run.show([9.0, None, None, *[3.0] * 5], "spike")[-1] == (28, "over", 0)


def test_in_a_young_run_five_finite_losses_are_enough() -> None:
    run = Run(healthy=3)
    assert run.show([9.0] * 6, "spike") == [(4, "take", 0), (9, "over", 0)]


def test_the_criterion_is_said() -> None:
    run = Run()
    run.show([9.0], "spike")
    assert run.ladder.criterion(0) == "median of 5 losses <= 3.09 within 10 steps"
    assert run.ladder.criterion(3) == ""


def test_its_state_goes_on_in_mid_trouble() -> None:
    straight, first = Run(), Run()
    straight.show([9.0] * 8, "spike")
    first.show([9.0] * 4, "spike")
    second = Run(healthy=0)
    second.ladder.load_state_dict(first.ladder.state_dict())
    second.step = first.step
    second.show([9.0] * 4)
    assert second.ladder.state_dict() == straight.ladder.state_dict()
    assert second.show([9.0] * 40) == straight.show([9.0] * 40)


def resumed(first: Run, acts: bool) -> Run:
    """The same run, gone on with."""
    second = Run(ladder(acts=acts), healthy=0)
    second.ladder.load_state_dict(first.ladder.state_dict())
    second.step = first.step
    return second


def test_what_a_dry_run_has_said_is_done_by_one_that_acts_from_where_the_trouble_begins() -> None:
    dry = Run(ladder(acts=False))
    assert dry.show([9.0] * 23, "spike") == [(21, "take", 0), (31, "take", 1), (41, "take", 2)]
    assert resumed(dry, acts=False).show([9.0] * 9)[:1] == [(51, "take", 3)], "the dry run itself goes on"
    assert resumed(dry, acts=True).show([9.0] * 11) == [(44, "take", 0), (54, "take", 1)]
    assert resumed(dry, acts=True).show([math.nan], "not_finite") == [(44, "take", 2)], "unless there is worse"
    assert resumed(dry, acts=True).show([9.0], "surge") == [(44, "take", 1)]


def test_what_was_done_before_a_dry_run_is_not_done_again() -> None:
    first = Run()
    first.show([9.0] * 3, "spike")
    dry = resumed(first, acts=False)
    assert resumed(dry, acts=True).show([9.0] * 8) == [(31, "take", 1)], "the dry run has said nothing yet"
    dry.show([9.0] * 20)
    assert resumed(dry, acts=True).show([9.0]) == [(44, "take", 1)], "the wait was real, the cut was not"


def test_a_cut_that_was_only_said_has_no_cooldown() -> None:
    dry = Run(ladder(acts=False))
    dry.show([3.0] * 6, "surge")
    assert resumed(dry, acts=True).show([9.0], "surge") == [(27, "take", 1)]
    assert resumed(dry, acts=False).show([9.0], "surge") == []


def test_a_dry_run_says_the_end_once_and_watches_whether_the_trouble_ends_by_itself() -> None:
    dry = Run(ladder(acts=False))
    assert dry.show([9.0] * 200, "spike")[-1] == (51, "take", 3)
    assert dry.show([3.0] * 6) == [(223, "over", 3)]


def test_the_state_of_before_dry_runs_were_told_apart_means_what_it_meant() -> None:
    first = Run()
    first.show([9.0] * 12, "spike")
    state = first.ladder.state_dict()
    del state["made_cut"], state["episode"]["made"]
    second = Run(healthy=0)
    second.ladder.load_state_dict(state)
    assert second.ladder.state_dict() == first.ladder.state_dict()
