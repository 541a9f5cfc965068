from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_stable.data.weights import BLOCK, ConstantBlocks, ScheduledBlocks, WeightSchedule, largest_remainder
from lit_stable.data.weights import quotas as constant_quotas


def stages(*marks):
    return WeightSchedule({str(position): {"a": a, "b": b} for position, a, b in marks})


def linear(*marks):
    return WeightSchedule({str(position): {"a": a, "b": b} for position, a, b in marks}, "linear")


def blocks_of(schedule):
    return schedule.blocks(["a", "b"], tokens_per_sample=8)


def shares_up_to(blocks, position):
    """Samples of each source before a position at which a block begins."""
    block = int(blocks.number(np.array([position]))[0])
    assert blocks.start(block) == position
    return blocks.before(block).tolist()


def test_constant_blocks_are_alike():
    blocks = ConstantBlocks([40_000, 25_536])
    assert blocks.number(np.array([0, BLOCK - 1, BLOCK, 5 * BLOCK])).tolist() == [0, 0, 1, 5]
    assert (blocks.start(7), blocks.before(3).tolist()) == (7 * BLOCK, [120_000, 76_608])


def test_stages_hold_exactly_between_their_marks():
    blocks = blocks_of(stages((0, 3, 1), (1000, 1, 1), (101_000, 0, 1)))
    assert shares_up_to(blocks, 1000) == [750, 250]
    assert shares_up_to(blocks, 101_000) == [50_750, 50_250]
    assert shares_up_to(blocks, 101_000 + 2 * BLOCK) == [50_750, 50_250 + 2 * BLOCK]


def test_a_line_is_integrated_exactly():
    blocks = blocks_of(linear((0, 1, 0), (100_000, 0, 1), (200_000, 0, 1)))
    assert shares_up_to(blocks, 100_000) == [50_000, 50_000]
    assert shares_up_to(blocks, 200_000) == [50_000, 150_000]
    half = int(blocks.number(np.array([50_000]))[0])
    edge, sums = blocks.start(half), blocks.before(half)
    assert abs(sums[0] - (edge - edge**2 / 200_000)) <= 1
    quotas = [blocks.quotas(block)[0] / blocks.quotas(block).sum() for block in range(60)]
    assert np.all(np.diff(quotas) < 0)  # the share falls from block to block


@given(
    marks=st.lists(st.integers(1, 5000), max_size=4, unique=True).map(lambda marks: [0, *sorted(marks)]),
    data=st.data(),
    shape=st.sampled_from(["stages", "linear"]),
)
@settings(deadline=None, max_examples=60)
def test_blocks_tile_the_stream_and_sums_stay_next_to_the_integral(marks, data, shape):
    weight = st.sampled_from([0, 1, 2, 7, 0.1, 1e-4])
    weights = data.draw(
        st.lists(st.tuples(weight, weight, weight).filter(any), min_size=len(marks), max_size=len(marks))
    )
    shares = [[Fraction(w) / sum(map(Fraction, row)) for w in row] for row in weights]
    blocks = ScheduledBlocks(marks, shares, shape == "linear")
    last = int(blocks.number(np.array([marks[-1]]))[0])
    position, sums = 0, np.zeros(3, dtype=np.int64)
    exact = np.zeros(3)
    for block in range(last + 2):
        quotas = blocks.quotas(block)
        assert blocks.start(block) == position
        assert blocks.before(block).tolist() == sums.tolist()
        assert quotas.min() >= 0
        assert set(blocks.number(np.array([position, position + quotas.sum() - 1])).tolist()) == {block}
        exact += integral(marks, shares, shape, position, position + int(quotas.sum()))
        position, sums = position + int(quotas.sum()), sums + quotas
        if block < last:
            assert np.abs(sums - exact).max() < 2
        else:
            assert quotas.tolist() == constant_quotas(shares[-1])


def test_behind_the_last_mark_blocks_are_those_of_constant_weights():
    little = Fraction(1, 3 * BLOCK)  # a third of a sample per block, which is never nothing
    blocks = ScheduledBlocks([0, 1], [[Fraction(1), Fraction(0)], [little, 1 - little]], linear=False)
    assert [blocks.quotas(block).tolist() for block in (0, 1, 2)] == [[1, 0], [1, BLOCK - 1], [1, BLOCK - 1]]


def integral(marks, shares, shape, start, stop):
    """Of the shares, summed position by position at its middle, which is exact for lines."""
    total = np.zeros(3)
    for begin, end, old, new in zip(marks, [*marks[1:], None], shares, [*shares[1:], shares[-1]], strict=True):
        low, high = max(begin, start), stop if end is None else min(end, stop)
        if low < high:
            middle = ((low + high) / 2 - begin) / (end - begin) if shape == "linear" and end is not None else 0
            total += [(high - low) * float(a + (b - a) * Fraction(middle)) for a, b in zip(old, new, strict=True)]
    return total


@pytest.mark.parametrize("begin", [0, 10**6])
def test_a_long_line_is_followed_in_64_steps_wherever_it_begins(begin):
    late = [] if begin == 0 else [(0, 1, 0)]
    blocks = blocks_of(linear(*late, (begin, 1, 0), (begin + 64 * 2000, 0, 1)))
    first, last = blocks.number(np.array([begin, begin + 64 * 2000])).tolist()
    assert last - first == 64


def test_marks_in_tokens_are_samples_of_full_length():
    schedule = WeightSchedule({"0": {"a": 1, "b": 0}, "8001": {"a": 0, "b": 1}}, unit="tokens")
    assert shares_up_to(blocks_of(schedule), 1001) == [1001, 0]


def test_one_mark_is_a_constant():
    blocks = blocks_of(stages((0, 3, 1)))
    assert blocks.number(np.array([0, BLOCK])).tolist() == [0, 1]
    assert blocks.before(2).tolist() == [2 * 49_152, 2 * 16_384]


def test_whole_numbers_lie_next_to_the_wanted_ones():
    assert largest_remainder([Fraction(5, 3), Fraction(5, 3), Fraction(5, 3)], 5) == [2, 2, 1]


@pytest.mark.parametrize(
    ("marks", "problem"),
    [
        ({}, "data.weight_schedule.marks: must begin at 0 and ascend."),
        ({"5": {"a": 1, "b": 1}}, "data.weight_schedule.marks: must begin at 0 and ascend."),
        ({"0": {"a": 1, "b": 1}, "0k": {"a": 1, "b": 1}}, "data.weight_schedule.marks: must begin at 0 and ascend."),
        ({"0": {"a": 1}}, "data.weight_schedule.marks.0: names a; must give a weight to each of a, b."),
        ({"0": {"a": 1, "b": -1}}, "data.weight_schedule.marks.0: weights must be finite, at least 0, and not all 0."),
        ({"0": {"a": 0, "b": 0}}, "data.weight_schedule.marks.0: weights must be finite, at least 0, and not all 0."),
        ({"soon": {"a": 1, "b": 1}}, "data.weight_schedule.marks.soon: 'soon': must be a whole number >= 0"),
    ],
)
def test_what_is_no_schedule_is_told(marks, problem):
    (told,) = WeightSchedule(marks).problems(["a", "b"])
    assert told.startswith(problem)
    assert WeightSchedule({"0": {"a": 1, "b": 0}, "1.5k": {"a": 0, "b": 1}}).problems(["a", "b"]) == []
