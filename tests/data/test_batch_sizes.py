from __future__ import annotations

import pytest

from lit_stable.data.batch_sizes import batch_size_problems


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
