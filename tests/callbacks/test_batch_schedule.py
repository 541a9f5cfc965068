from __future__ import annotations

import itertools
from typing import Any

import pytest

from lit_stable.callbacks.batch_schedule import BatchSchedule, build_schedule

MEGATRON = "16 16 6_000_000"


@pytest.mark.parametrize(
    ("iteration", "consumed", "batch"),
    [
        (6502, 216_960, 80),
        (7000, 260_912, 96),
        (8600, 464_560, 160),
        (11446, 1_255_856, 432),
        (12000, 1_519_744, 528),
        (14000, 3_014_320, 1024),
        (17060, 8_126_688, 2048),
    ],
)
def test_the_ramp_of_104b_at_every_line_of_its_log(iteration: int, consumed: int, batch: int) -> None:
    ramp = build_schedule(MEGATRON, full=2048)
    assert ramp.samples_before(iteration + 1) == consumed
    assert ramp.batch(ramp.samples_before(iteration)) == batch


def test_the_ramp_of_104b_as_a_whole() -> None:
    ramp = build_schedule([16, 16, 6_000_000], full=2048)
    full = ramp.stages[-1]
    assert (full.step, full.samples) == (16_022, 6_000_864)
    assert ramp.steps_in(300_000_000) == 159_576
    assert build_schedule("2048", full=2048).steps_in(300_000_000) == 146_484


def test_the_ramp_of_bloom() -> None:
    ramp = build_schedule("192 16 9_765_625", full=2048)
    assert (ramp.stages[-1].step, ramp.stages[-1].samples) == (12_658, 9_765_808)
    assert ramp.samples_before(12_695 + 1) == 9_841_584


def test_160k_iterations_equal_a_simulation_in_megatrons_own_arithmetic() -> None:
    ramp = build_schedule(MEGATRON, full=2048)
    consumed, per_increment = 0, 6_000_000 / 127
    for iteration in range(1, 160_001):
        assert ramp.samples_before(iteration) == consumed
        assert ramp.steps_in(consumed) == iteration - 1
        batch = 2048 if consumed > 6_000_000 else 16 + 16 * int(consumed / per_increment)
        assert ramp.batch(consumed) == batch
        consumed += batch


@pytest.mark.parametrize("ramp", [MEGATRON, "192 16 9_765_625", "1024 for 7200 steps then 2048"])
def test_windows_from_anywhere_are_those_of_a_walk(ramp: str) -> None:
    schedule = build_schedule(ramp, full=2048)
    for consumed in (0, 1, 999, 47_245, 6_000_001):
        here = consumed
        for steps in range(200):
            assert schedule.samples_after(consumed, steps) == here
            here += schedule.batch(here)
    assert all(schedule.samples_after(0, steps) == schedule.samples_before(steps + 1) for steps in range(0, 20_000, 97))


def test_bloomberggpts_stages_in_steps() -> None:
    ramp = build_schedule("1024 for 7200 steps then 2048", full=2048)
    assert ramp.samples_before(7201) == 7200 * 1024
    assert [ramp.batch(n) for n in (0, 7200 * 1024 - 1, 7200 * 1024)] == [1024, 1024, 2048]
    assert ramp.samples_before(7200 + 132_000 + 1) == 1024 * 7200 + 2048 * 132_000


@pytest.mark.parametrize(
    "same",
    [
        "1024 for 7200 steps",
        "1024 for 7_372_800 samples then 2048",
        "1024 for 15_099_494_400 tokens then 2048",
        [{"batch": 1024, "steps": 7200}, {"batch": 2048}],
        [{"batch": 1024, "samples": "7372800"}],
        "1024 doubling at 7200 steps",
        "1024 doubling at 7372800 samples",
    ],
)
def test_one_ramp_in_many_words(same: Any) -> None:
    expected = build_schedule("1024 for 7200 steps then 2048", full=2048)
    assert build_schedule(same, full=2048, tokens_per_sample=2048).stages == expected.stages


def test_doubling_at_token_marks_by_hand() -> None:
    ramp = build_schedule("4 doubling at 100, 300 tokens", full=16, tokens_per_sample=10)
    # Marks at 10 and 30 samples: 4 4 4 | 8 8 8 (12, 20, 28) | 16 from 36 on.
    consumed = list(itertools.accumulate([4, 4, 4, 8, 8, 8, 16, 16], initial=0))
    assert [ramp.samples_before(step) for step in range(1, 10)] == consumed
    assert [ramp.batch(n) for n in (9, 10, 29, 30)] == [4, 8, 8, 16]


def test_marks_in_tokens_that_are_no_whole_samples_do_not_drift() -> None:
    ramp = build_schedule("1 doubling at 10, 20, 30 tokens", full=8, tokens_per_sample=3)
    assert [stage.mark for stage in ramp.stages] == [0, 4, 7, 10]  # 3.33, 6.67 and 10 samples


def test_a_stage_that_the_one_before_runs_over_is_jumped() -> None:
    ramp = build_schedule("8 for 4 samples then 16 for 2 samples then 32", full=32)
    assert [ramp.samples_before(step) for step in (1, 2, 3)] == [0, 8, 40]
    assert [stage.batch for stage in ramp.reached()] == [8, 32]


def test_steps_after_samples_count_from_where_the_samples_really_ended() -> None:
    ramp = build_schedule("8 for 12 samples then 4 for 3 steps then 2", full=2)
    assert [ramp.samples_before(step) for step in range(1, 8)] == [0, 8, 16, 20, 24, 28, 30]


def test_what_a_run_has_behind_it_is_not_reached_again() -> None:
    ramp = build_schedule("2 for 2 steps then 4 for 2 steps then 8", full=8)
    assert [stage.batch for stage in ramp.reached(0)] == [2, 4, 8]
    assert [stage.batch for stage in ramp.reached(5)] == [4, 8]
    assert [stage.batch for stage in ramp.reached(500)] == [8]


def test_a_count_between_two_windows_has_the_batch_of_its_mark() -> None:
    ramp = build_schedule("4 for 2 steps then 8", full=8)  # after a window that an epoch's end cut short
    assert [ramp.batch(n) for n in (5, 7, 8, 13)] == [4, 4, 8, 8]


def test_a_constant_batch() -> None:
    ramp = BatchSchedule([(8, None)])
    assert [ramp.samples_before(step) for step in (1, 2, 100)] == [0, 8, 792]
    assert ramp.steps_in(17) == 2


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (
            "16 16 6_000",
            r"start 16 \+ a multiple of increment 16: must reach 100; nearest legal increments are 14 and 21\.",
        ),
        ("200 16 6_000", r"must reach 100; start below 100"),
        ("0 4 100", r"each must be at least 1"),
        ("50 for 3 steps then 90", r"ends at 90: must end at the full global batch 100"),
        ("50 for 3 tokens", r"3 tokens: tokens_per_sample must be given"),
        ("50 for 3", r"names no unit: write steps, samples or tokens"),
        ("50 doubling at 5, 5 steps", r"marks 5, 5: must be above 0 and ascending"),
        ("50 doubling at 0 steps", r"marks 0: must be above 0"),
        ("40 doubling at 9 steps", r"ends at 80: must end at the full global batch 100"),
        ("50 every 3 steps", r"'50 every 3 steps': must read VALUE for LENGTH"),
        ([{"batch": 50, "until": 3}], r"must have the key batch"),
        ([16, 4], r"\[16, 4\]: must be three numbers, start, increment and samples"),
    ],
)
def test_a_ramp_that_cannot_be_read_or_does_not_end_there_is_refused(ramp: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule(ramp, full=100)
