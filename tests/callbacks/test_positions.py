from __future__ import annotations

import random

import pytest

from lit_stable.callbacks.positions import merge_ranges, stream_position


@pytest.mark.parametrize(
    ("ranges", "merged"),
    [
        ([], []),
        ([(3, 5)], [(3, 5)]),
        ([(5, 7), (0, 2)], [(0, 2), (5, 7)]),
        ([(0, 2), (2, 4)], [(0, 4)]),  # touching
        ([(0, 9), (3, 5)], [(0, 9)]),  # nested
        ([[1, 4], [2, 6]], [(1, 6)]),  # lists, as a checkpoint holds them
        ([(3, 5), (3, 5)], [(3, 5)]),
    ],
)
def test_ranges_are_sorted_and_joined(ranges: list[tuple[int, int]], merged: list[tuple[int, int]]) -> None:
    assert merge_ranges(ranges) == merged


@pytest.mark.parametrize("wrong", [(4, 4), (5, 3), (-1, 2)])
def test_an_empty_reversed_or_negative_range_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"range \[{wrong[0]}, {wrong[1]}\): must be non-empty and start at 0"):
        merge_ranges([(0, 1), wrong])


def test_position_is_that_of_the_kept_sample_in_an_enumeration() -> None:
    generator = random.Random(0)
    for _ in range(200):
        starts = [generator.randrange(60) for _ in range(generator.randrange(5))]
        dropped = merge_ranges((s, s + generator.randrange(1, 12)) for s in starts)
        kept = [i for i in range(150) if not any(a <= i < b for a, b in dropped)]
        assert [stream_position(n, dropped) for n in range(60)] == kept[:60]
