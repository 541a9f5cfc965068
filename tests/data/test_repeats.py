from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.repeats import in_repeats


def slowly(row: list[int], max_period: int, min_count: int) -> list[bool]:
    """Token by token, from the definition: for each period, maximal stretches in which every token repeats."""
    found = [False] * len(row)
    for period in range(1, max_period + 1):
        start = 0
        while start + period <= len(row):
            stop = start + period
            while stop < len(row) and row[stop] == row[stop - period]:
                stop += 1
            if stop - start >= period * min_count:
                found[start:stop] = [True] * (stop - start)
            start = max(start + 1, stop - period + 1)
    return found


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=24, max_size=24), min_size=1, max_size=3),
    max_period=st.integers(1, 6),
    min_count=st.integers(2, 5),
)
def test_stretches_are_those_of_the_definition(rows, max_period, min_count):
    expected = [slowly(row, max_period, min_count) for row in rows]
    assert in_repeats(np.array(rows), max_period, min_count).tolist() == expected


@pytest.mark.parametrize("period", [1, 2, 7, 13])
@pytest.mark.parametrize("dtype", [np.int64, np.uint16])
def test_thirty_two_periods_count_and_one_token_less_does_not(period, dtype):
    noise = np.arange(100, 1124, dtype=dtype)
    rows = np.stack([noise, noise])
    for row, length in ((0, 32 * period), (1, 32 * period - 1)):
        rows[row, 200 : 200 + length] = np.resize(np.arange(period), length)
    found = in_repeats(rows, max_period=13, min_count=32)
    assert np.flatnonzero(found[0]).tolist() == list(range(200, 200 + 32 * period))
    assert not found[1].any()


def test_a_period_above_the_longest_is_left():
    row = np.resize(np.arange(14), 14 * 40)[None]
    assert not in_repeats(row, max_period=13, min_count=32).any()
    assert in_repeats(row, max_period=14, min_count=32).all()


def test_a_row_too_short_for_any_stretch_has_none():
    assert in_repeats(np.zeros((2, 3), dtype=np.int64), max_period=13, min_count=32).sum() == 0
    assert in_repeats(np.zeros((1, 0), dtype=np.int64), max_period=13, min_count=2).shape == (1, 0)


def test_the_mask_is_the_stretch_or_its_whole_sequence():
    tokens = np.array([[9, 5, 5, 5, 8], [1, 2, 3, 4, 5]])
    assert MaskRepeats(1, 3, "tokens").mask(tokens).tolist() == [[False, True, True, True, False], [False] * 5]
    assert MaskRepeats(1, 3, "sequence").mask(tokens).tolist() == [[True] * 5, [False] * 5]


def test_values_out_of_range_are_told():
    assert MaskRepeats() == MaskRepeats(13, 32, "sequence")  # OLMo-core's
    assert MaskRepeats().problems() == []
    assert MaskRepeats(0, 1).problems() == [
        "data.mask_repeats.max_period=0: must be at least 1.",
        "data.mask_repeats.min_count=1: must be at least 2.",
    ]
