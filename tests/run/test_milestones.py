from __future__ import annotations

import itertools
from typing import Any

import pytest

from lit_stable.callbacks import BatchSizeWarmup, LROverride, OptimizerReset, Progress
from lit_stable.callbacks.progress import Mark
from lit_stable.optim.schedule import LRSchedule
from lit_stable.run.milestones import Milestone, milestones


def test_where_something_begins_or_ends() -> None:
    schedule = LRSchedule(peak=1e-2, warmup=16, horizon=80, unit="samples")
    ramp = BatchSizeWarmup("4 for 2 steps", global_batch=8, micro_batch=2)
    callbacks = [Progress(), ramp, LROverride(start=9, factor=0.5), OptimizerReset(start=5), LROverride(factor=0.5)]
    assert [(m.unit, m.at, m.label) for m in milestones(schedule, callbacks)] == [
        ("samples", 16, "end of warm-up"),
        ("samples", 8, "before batch 8"),
        ("steps", 9, "before LROverride"),
        ("steps", 5, "before OptimizerReset"),
    ]
    assert milestones(None, []) == []


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"warmup": "375M", "horizon": "10B", "unit": "tokens"}, ("tokens", 375_000_000)),
        ({"warmup": "2k", "warmup_unit": "samples", "horizon": "10B", "unit": "tokens"}, ("samples", 2000)),
    ],
)
def test_a_warm_up_ends_where_its_own_unit_says(options: dict[str, Any], end: tuple[str, int]) -> None:
    (milestone,) = milestones(LRSchedule(peak=1e-2, **options), [])
    assert (milestone.unit, milestone.at) == end


def test_a_milestone_is_reached_once() -> None:
    milestone = Milestone("samples", 10, "")
    marks = [Mark(step, 4 * step, 0) for step in range(6)]
    reached = [milestone.is_reached(before, after) for before, after in itertools.pairwise(marks)]
    assert reached == [False, False, True, False, False]
