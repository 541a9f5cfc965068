from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_stable.data.epochs import Reshuffle, SampleOrder, SourceEpochs, shuffle_shards

SIZE = 500


def windows(order, epochs=2, reshuffles=(), seed=1, size=SIZE):
    """The windows of a source, epoch after epoch."""
    source = SourceEpochs(size, order, source=0, seed=seed, reshuffles=reshuffles)
    return np.concatenate([source(epoch, np.arange(size)) for epoch in range(epochs)])


@given(
    size=st.integers(1, 200),
    shard=st.integers(1, 60),
    buffer=st.integers(1, 5),
    key=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25)
def test_shards_give_each_window_once(size, shard, buffer, key):
    order = shuffle_shards(np.arange(size), size, shard, buffer, key)
    assert np.array_equal(np.sort(order), np.arange(size))
    alone = np.concatenate([shuffle_shards(np.array([i]), size, shard, buffer, key) for i in range(size)])
    assert np.array_equal(order, alone)


def test_shards_mix_within_their_buffer_and_not_beyond():
    order = shuffle_shards(np.arange(1000), 1000, shard=50, buffer=4, key=3)
    groups = [set((order[start : start + 200] // 50).tolist()) for start in range(0, 1000, 200)]
    assert [len(group) for group in groups] == [4] * 5
    assert len(set.union(*groups)) == 20
    assert any(max(group) - min(group) > 4 for group in groups)  # drawn from anywhere
    assert len(set((order[:50] // 50).tolist())) > 1  # mixed


def neighbours(order) -> float:
    """Correlation of each window with the next one: 1 as stored, 0 when any may follow any."""
    return float(np.corrcoef(order[:-1], order[1:])[0, 1])


def test_the_granularity_of_the_shuffle_shows_in_the_order():
    size = 20_000
    orders = {
        "stored": windows(SampleOrder("stored"), 1, size=size),
        "one shard": windows(SampleOrder("shards", 500, 1), 1, size=size),
        "shards": windows(SampleOrder("shards", 500, 2), 1, size=size),
        "shuffle": windows(SampleOrder("shuffle"), 1, size=size),
    }
    measured = {name: neighbours(order) for name, order in orders.items()}
    assert measured["stored"] > 0.999
    assert measured["one shard"] > 0.99
    assert 0.3 < measured["shards"] < 0.7  # half of the time the next window is of the same shard
    assert abs(measured["shuffle"]) < 0.03


@pytest.mark.parametrize("by", ["shuffle", "shards", "stored", "date"])
def test_every_epoch_holds_every_window_once(by):
    order = windows(SampleOrder(by, 64, 2), epochs=3).reshape(3, SIZE)
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(SIZE), (3, 1)))
    assert np.array_equal(order[0], order[1]) == (by in ("stored", "date"))
    assert np.array_equal(order[0], np.arange(SIZE)) == (by in ("stored", "date"))


@given(
    by=st.sampled_from(["shuffle", "shards", "stored"]),
    points=st.lists(st.tuples(st.integers(0, 3 * 40), st.integers(0, 5)), max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_reshuffles_lose_and_repeat_nothing_and_leave_the_past_alone(by, points):
    order = SampleOrder(by, 8, 2)
    reshuffles = [Reshuffle(after, seed) for after, seed in sorted(points)]
    read = windows(order, 3, reshuffles, size=40)
    assert np.array_equal(np.sort(read.reshape(3, 40), axis=1), np.tile(np.arange(40), (3, 1)))
    for count, reshuffle in enumerate(reshuffles):
        before = windows(order, 3, reshuffles[:count], size=40)
        assert np.array_equal(read[: reshuffle.after], before[: reshuffle.after])


def test_a_reshuffle_shuffles_what_is_left_as_a_whole_and_with_its_seed():
    stored = SampleOrder("stored")
    first, second = (windows(stored, 2, [Reshuffle(200, seed)]) for seed in (7, 8))
    assert first[:200].tolist() == list(range(200))
    assert sorted(first[200:500].tolist()) == list(range(200, 500))
    assert abs(neighbours(first[200:500])) < 0.2
    assert abs(neighbours(first[500:])) < 0.2  # later epochs too
    assert not np.array_equal(first[200:], second[200:])
    assert not np.array_equal(first[500:], second[500:])


def test_sizes_out_of_range_are_told():
    assert SampleOrder().problems() == []
    assert SampleOrder("shards", 0, 0).problems() == [
        "data.order.shard_windows=0: must be at least 1.",
        "data.order.buffer_shards=0: must be at least 1.",
    ]
