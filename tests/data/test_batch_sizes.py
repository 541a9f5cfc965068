from __future__ import annotations

import pytest

from lit_stable.callbacks import BatchSizeWarmup
from lit_stable.data.batch_sizes import batch_size_problems, samples_before


@pytest.mark.parametrize(
    ("micro", "total", "ranks", "problem"),
    [
        (6, 32, 1, "data.micro_batch=6: must divide data.global_batch=32; nearest legal values are 4 and 8."),
        (64, 32, 1, "data.micro_batch=64: must divide data.global_batch=32; nearest legal value is 32."),
        (
            4,
            32,
            3,
            "data.global_batch=32: must be a multiple of data.micro_batch=4 x 3 data-parallel ranks = 12; "
            "nearest legal values are 24 and 36.",
        ),
        (
            8,
            8,
            2,
            "data.global_batch=8: must be a multiple of data.micro_batch=8 x 2 data-parallel ranks = 16; "
            "nearest legal value is 16.",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_told_with_the_nearest_that_do(micro, total, ranks, problem):
    assert batch_size_problems(micro, total, ranks) == [problem]


def test_sizes_below_one_are_all_told():
    assert batch_size_problems(0, -1) == [
        "data.micro_batch=0: must be at least 1.",
        "data.global_batch=-1: must be at least 1.",
    ]


def test_sizes_that_fit_are_no_problem():
    assert batch_size_problems(4, 32, ranks=8) == []


def test_samples_before_a_step_are_counted_from_where_a_run_stands():
    ramp = BatchSizeWarmup("1 for 20 samples then 4", global_batch=4, micro_batch=1)
    assert [samples_before(step, 2, 8, 4, None) for step in (1, 3, 5)] == [0, 8, 16]
    assert [samples_before(step, 0, 0, 4, ramp) for step in (1, 21, 22)] == [0, 20, 24]
    # Two steps of 4 lie behind: the ramp reaches its mark at step 14, not at 20.
    assert [samples_before(step, 2, 8, 4, ramp) for step in (3, 15, 16)] == [8, 20, 24]
    assert samples_before(2, 2, 8, 4, ramp) < 8
