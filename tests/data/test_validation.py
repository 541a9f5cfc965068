from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader

from lit_stable.data.validation import ValidationWindows


def test_windows_come_in_order_with_padding_at_the_end(make_store):
    store = make_store(num_tokens=4 * 7 + 1)
    batches = list(DataLoader(ValidationWindows(store, 4, None, micro_batch=3), batch_size=None))
    assert len(batches) == 3
    assert torch.cat([batch["input_ids"] for batch in batches])[:7].flatten().tolist() == list(range(28))
    assert batches[2]["labels"].tolist() == [[25, 26, 27, 256], [-100] * 4, [-100] * 4]
    assert all(batch["source"].tolist() == [0, 0, 0] for batch in batches)


def test_a_limit_spreads_over_the_whole_store(make_store):
    store = make_store(num_tokens=4 * 100 + 1)
    assert ValidationWindows(store, 4, 5).windows.tolist() == [0, 20, 40, 60, 80]
    assert ValidationWindows(store, 4, 1000).windows.tolist() == list(range(100))


@pytest.mark.parametrize(("size", "micro_batch"), [(1, 4), (2, 4), (3, 2), (8, 1), (16, 4)])
def test_ranks_share_the_windows_in_equal_numbers_of_batches(make_store, size, micro_batch):
    store = make_store(num_tokens=4 * 13 + 1)
    ranks = [
        list(ValidationWindows(store, 4, None, micro_batch=micro_batch, rank=rank, size=size)) for rank in range(size)
    ]
    assert {len(batches) for batches in ranks} == {math.ceil(13 / (size * micro_batch))}
    labels = torch.cat([batch["labels"] for batches in ranks for batch in batches]).flatten()
    assert sorted(labels[labels != -100].tolist()) == sorted([*range(1, 52), 256])


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_do_not_repeat_windows(make_store, num_workers):
    windows = ValidationWindows(make_store(num_tokens=4 * 13 + 1), 4, None, micro_batch=2)
    loader = DataLoader(windows, batch_size=None, num_workers=num_workers)
    for alone, together in zip(windows, loader, strict=True):
        assert torch.equal(alone["labels"], together["labels"])


def test_unigram_entropy_is_that_of_the_labels(make_store):
    # Labels: 1, 1, 1, 1, 2, 2, 3, eot; the first token is never a label.
    store = make_store(documents=[[9, 1, 1, 1, 1, 2, 2, 3]])
    expected = -(0.5 * math.log(0.5) + 0.25 * math.log(0.25) + 2 * 0.125 * math.log(0.125))
    assert ValidationWindows(store, 8, None).unigram_entropy() == pytest.approx(expected, rel=1e-12)


def test_a_window_has_the_source_of_the_document_it_begins_in(make_writer_store):
    store = make_writer_store([([1] * 5, "news"), ([2] * 9, "web"), ([3] * 4, "news")])  # each with an eot behind it
    (batch,) = ValidationWindows(store, 4, None, micro_batch=5)
    assert store.sources == ["news", "web"]
    starts = [0, 4, 8, 12, 16]  # documents begin at 0, 6 and 16
    assert [window * 4 for window in ValidationWindows(store, 4, None).windows.tolist()] == starts
    assert batch["source"].tolist() == [0, 0, 1, 1, 0]


def test_padding_of_single_rows_leaves_legal_inputs(make_store):
    """Two ranks and one window: the second rank has a row of padding alone, whose inputs an embedding must take."""
    store = make_store(num_tokens=5)
    (batch,) = ValidationWindows(store, 4, None, micro_batch=1, rank=1, size=2)
    assert batch["labels"].tolist() == [[-100] * 4]
    assert batch["input_ids"].tolist() == [[0] * 4]
