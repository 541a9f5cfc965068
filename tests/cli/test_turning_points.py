"""The rows of a trace that are worth reading."""

from __future__ import annotations

import pytest

from lit_stable.callbacks import BatchSizeWarmup, GradClip, LROverride, SequenceLengthWarmup
from lit_stable.cli.trace import trace
from lit_stable.cli.turning_points import turning_points
from lit_stable.optim.schedule import LRSchedule, format_lr


def table(*features, schedule, steps=1000):
    rows = trace(schedule, 0.1, 8, 64, features, steps)
    head, columns, *lines = turning_points(rows).splitlines()
    assert (head, columns.split()) == ("turning points:", ["iteration", "samples", "tokens"])
    found = [line.split(maxsplit=3) for line in lines]
    for iteration, samples, tokens, _ in found:
        row = rows[int(iteration.replace(",", "")) - 1]
        assert [samples, tokens] == [f"{row.samples:,}", f"{row.tokens:,}"]
    return [(int(line[0].replace(",", "")), line[3]) for line in found]


def test_where_rate_batch_length_and_clipping_change():
    features = (
        BatchSizeWarmup("2 for 100 steps then 4 for 50 steps", global_batch=8, micro_batch=1),
        SequenceLengthWarmup("linear", min_length=8, total_steps=200, max_length=64),
        GradClip(2.5, schedule=[{"from": 400, "max_norm": 1.0}]),
        LROverride(start=600, factor=0.5, weight_decay=0.01),
    )
    schedule = LRSchedule(peak=1.0, warmup=50, horizon=900, floor=0.1)
    assert table(*features, schedule=schedule) == [
        (50, "the learning rate is at its highest, 1"),
        (150, "batches have their last size, 8"),
        (199, "sequences have their last size, 64"),
        (400, "clipping norm 2.5 -> 1.0"),
        (600, f"learning rate {format_lr(schedule.lr(599))} -> {format_lr(schedule.lr(600) / 2)}"),
        (600, "weight decay 0.1 -> 0.01"),
        (900, "the learning rate is at its last value, 0.05"),
        (1000, "end, learning rate 0.05"),
    ]


def test_a_run_in_which_nothing_changes_has_a_beginning_and_an_end():
    assert table(schedule=LRSchedule(peak=1.0, shape="constant"), steps=3) == [
        (1, "the learning rate is at its highest, 1"),
        (3, "end, learning rate 1"),
    ]


def test_of_very_many_the_first_and_the_last_are_shown():
    stages = [{"from": n, "max_norm": float(n)} for n in range(1, 60)]
    rows = trace(LRSchedule(peak=1.0, shape="constant"), 0.1, 8, 64, [GradClip(9.0, schedule=stages)], 100)
    lines = turning_points(rows).splitlines()
    assert len(lines) == 2 + 24 + 1
    assert "end, learning rate 1" in lines[-2]
    assert lines[-1] == "  (36 more; --trace FILE has every iteration)"


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_the_decay_of_a_short_run_is_no_row_of_jumps_and_an_override_in_it_is(shape):
    """Its rate moves by more than a hundredth at every iteration."""
    schedule = LRSchedule(peak=1.0, shape=shape, warmup=10, horizon=100, floor=0.1)
    override = LROverride(start=60, factor=0.5)
    assert table(override, schedule=schedule, steps=100) == [
        (10, "the learning rate is at its highest, 1"),
        (60, f"learning rate {format_lr(schedule.lr(59))} -> {format_lr(schedule.lr(60) / 2)}"),
        (100, f"end, learning rate {format_lr(schedule.lr(100) / 2)}"),
    ]
