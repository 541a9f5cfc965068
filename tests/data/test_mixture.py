from __future__ import annotations

import numpy as np
import pytest

from lit_stable.data.epochs import Reshuffle, SampleOrder
from lit_stable.data.mixture import Mixture
from lit_stable.data.weights import BLOCK, WeightSchedule, quotas


def test_quotas_are_the_largest_remainders():
    assert quotas([1, 1, 1]) == [21846, 21845, 21845]
    assert quotas([3, 1]) == [49152, 16384]
    assert quotas([0.7, 0.2, 0.1]) == [45875, 13107, 6554]  # 45875.2, 13107.2, 6553.6


def test_a_small_weight_is_not_rounded_away():
    assert quotas([1e9, 1]) == [BLOCK - 1, 1]


def test_weight_zero_leaves_a_source_out():
    assert quotas([0, 2]) == [0, BLOCK]


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf")]])
def test_unusable_weights_are_refused(weights):
    with pytest.raises(ValueError, match="must be finite, at least 0, and not all 0"):
        quotas(weights)


def test_more_sources_than_places_are_refused():
    with pytest.raises(ValueError, match="at most 65536 fit"):
        quotas([1.0] * (BLOCK + 1))


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 sources, 1 weights, 2 sizes: must agree"):
        Mixture(["a", "b"], [1], [1, 1], seed=0)


def test_source_without_a_window_is_refused():
    with pytest.raises(ValueError, match="sources b: hold not even one window"):
        Mixture(["a", "b"], [1, 1], [1, 0], seed=0)


def test_sources_are_drawn_by_weight():
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    sources, _, _ = Mixture(list("abcd"), weights.tolist(), [10**6] * 4, seed=1).locate(np.arange(10_000) + 30_000)
    expected = 10_000 * weights
    # Chi-square with 3 degrees of freedom exceeds 16.3 once in a thousand.
    assert ((np.bincount(sources, minlength=4) - expected) ** 2 / expected).sum() < 16.3


def test_a_block_holds_the_exact_quotas():
    mixture = Mixture(["a", "b"], [0.9, 0.1], [1000, 1000], seed=1)
    sources, _, _ = mixture.locate(np.arange(BLOCK, 2 * BLOCK))
    assert np.bincount(sources).tolist() == quotas([0.9, 0.1])


@pytest.mark.parametrize("num_windows", [1, 7, 1000, 70_000])
def test_one_source_gives_each_window_once_per_epoch(num_windows):
    positions = np.arange(2 * num_windows)
    _, epochs, windows = Mixture(["a"], [1.0], [num_windows], seed=4).locate(positions)
    assert np.array_equal(epochs, positions // num_windows)
    for epoch in (0, 1):
        assert np.array_equal(np.sort(windows[epochs == epoch]), np.arange(num_windows))


def test_an_epoch_of_a_source_ends_before_its_next_begins():
    sources, epochs, windows = Mixture(["a", "b"], [1, 3], [50, 1000], seed=4).locate(np.arange(3000))
    for source, size in ((0, 50), (1, 1000)):
        own_epochs, own_windows = epochs[sources == source], windows[sources == source]
        assert np.all(np.diff(own_epochs) >= 0)
        assert np.array_equal(np.sort(own_windows[:size]), np.arange(size))


def test_blocks_join_without_a_gap_or_a_repetition():
    sources, epochs, windows = Mixture(["a", "b"], [2, 1], [10**6, 10**6], seed=4).locate(np.arange(2 * BLOCK + 500))
    for source in (0, 1):
        assert set(epochs[sources == source]) == {0}
        assert len(set(windows[sources == source])) == (sources == source).sum()


def test_epochs_are_shuffled_differently():
    _, _, windows = Mixture(["a"], [1.0], [1000], seed=4).locate(np.arange(2000))
    assert (windows[:1000] == windows[1000:]).sum() < 10


def test_seed_changes_the_order():
    first, second = (Mixture(["a"], [1.0], [1000], seed=seed).locate(np.arange(1000))[2] for seed in (1, 2))
    assert (first == second).sum() < 10


def test_any_position_is_reached_alone_and_in_any_order():
    positions = np.array([10**11, 5, 3 * BLOCK, 70_000, 5])
    mixture = Mixture(["a", "b"], [1, 1], [10**11, 12], seed=1)
    together = np.stack(mixture.locate(positions))
    alone = np.concatenate(
        [np.stack(Mixture(["a", "b"], [1, 1], [10**11, 12], seed=1).locate(positions[i : i + 1])) for i in range(5)],
        axis=1,
    )
    assert np.array_equal(together, alone)


def test_order_is_pinned():
    """An upgrade that changes these values changes the data order of every run that resumes."""
    mixture = Mixture(["a", "b"], [0.75, 0.25], [1000, 300], seed=1)
    sources, epochs, windows = mixture.locate(np.array([0, 1, 2, 3, 4, 65_536, 1_000_000]))
    assert sources.tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert epochs.tolist() == [0, 0, 0, 0, 0, 49, 749]
    assert windows.tolist() == [162, 897, 15, 458, 937, 507, 616]


def test_counts_are_those_of_the_samples():
    for weights in (
        [0.7, 0.3],
        WeightSchedule({"0": {"a": 1, "b": 0}, "3k": {"a": 1, "b": 3}}, "linear").blocks("ab", 8),
    ):
        mixture = Mixture(["a", "b"], weights, [1000, 400], seed=2)
        sources, _, _ = mixture.locate(np.arange(BLOCK + 5000))
        for position in (0, 1, 777, 1024, 3000, BLOCK - 1, BLOCK, BLOCK + 4999):
            assert mixture.counts(position).tolist() == np.bincount(sources[:position], minlength=2).tolist()


def test_shares_follow_a_schedule_and_any_position_is_reached_alone():
    schedule = WeightSchedule({"0": {"a": 1, "b": 0}, "10k": {"a": 1, "b": 1}, "20k": {"a": 0, "b": 1}})
    mixture = Mixture(["a", "b"], schedule.blocks(["a", "b"], 8), [10**6, 700], seed=2)
    sources, epochs, windows = mixture.locate(np.arange(30_000))
    assert [int(part.sum()) for part in np.split(sources, 3)] == [0, 5000, 10_000]
    own = windows[sources == 1]
    assert np.array_equal(epochs[sources == 1], np.arange(15_000) // 700)
    assert np.array_equal(np.sort(own[:700]), np.arange(700))
    positions = np.array([29_999, 0, 10_000, 19_999])
    again = Mixture(["a", "b"], schedule.blocks(["a", "b"], 8), [10**6, 700], seed=2).locate(positions)
    assert np.array_equal(np.stack(again), np.stack([sources[positions], epochs[positions], windows[positions]]))


@pytest.mark.parametrize("by", ["shuffle", "stored", "shards"])
def test_a_reshuffle_changes_windows_behind_its_position_and_nothing_else(by):
    order = SampleOrder(by, 16, 2)
    plain, reshuffled = (
        Mixture(["a", "b"], [2, 1], [300, 90], 5, order, reshuffles) for reshuffles in ([], [Reshuffle(200, 9)])
    )
    before, after = (mixture.locate(np.arange(1200)) for mixture in (plain, reshuffled))
    assert np.array_equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert np.array_equal(before[2][:200], after[2][:200])
    assert not np.array_equal(before[2][200:], after[2][200:])
    for source, size in ((0, 300), (1, 90)):
        own = after[2][after[0] == source]
        whole = len(own) // size * size
        assert np.array_equal(
            np.sort(own[:whole].reshape(-1, size), axis=1), np.tile(np.arange(size), (whole // size, 1))
        )


def test_stored_order_keeps_each_source_in_its_own():
    sources, _, windows = Mixture(["a", "b"], [2, 1], [300, 90], 5, SampleOrder("stored")).locate(np.arange(400))
    for source, size in ((0, 300), (1, 90)):
        own = windows[sources == source]
        assert own.tolist() == (np.arange(len(own)) % size).tolist()


def test_reshuffles_add_up_and_each_leaves_alone_what_was_read_before_it():
    first, second = Reshuffle(200, 9), Reshuffle(260, 10)
    one, two = (
        np.stack(Mixture(["a", "b"], [2, 1], [300, 90], 5, reshuffles=r).locate(np.arange(390)))
        for r in ([first], [first, second])
    )
    assert np.array_equal(one[:, :260], two[:, :260])
    assert not np.array_equal(one, two)
    assert len(np.unique(two, axis=1).T) == 390, "nothing comes twice"
