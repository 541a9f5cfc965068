from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_stable.data import filtered_store
from lit_stable.data.columns import Column, column_of
from lit_stable.data.conditions import DocumentFilter
from lit_stable.data.filtered_store import FilteredStore
from lit_stable.data.store import TokenStore
from lit_stable.data.store_writer import TokenStoreWriter


def write(path, lengths, scores):
    """Documents of that many tokens, whose ids count up through the store, and their scores."""
    options = {"vocab_size": 60_000, "eot_id": 59_999, "tokenizer": "t.json", "tokenizer_sha256": "0", "split": "train"}
    tokens = np.arange(sum(lengths))
    tokens[np.cumsum(lengths) - 1] = 59_999
    sources = Column(np.arange(len(lengths), dtype=np.int32) % 2, ["even", "odd"])
    dates = np.arange(len(lengths)) + 20200101
    with TokenStoreWriter(path, columns={"score": False}, **options) as writer:
        writer.add_many(tokens, lengths, sources, dates, {"score": column_of("score", scores)})
    return path


@given(
    documents=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([None, 0.0, 1.0])), min_size=1, max_size=40).filter(
        lambda documents: any(score == 1.0 for _, score in documents)
    ),
    block=st.integers(1, 7),
    data=st.data(),
)
@settings(deadline=None, max_examples=40)
def test_a_filtered_store_reads_as_if_the_others_had_never_been_written(tmp_path_factory, documents, block, data):
    folder = tmp_path_factory.mktemp("stores")
    lengths, scores = [length for length, _ in documents], [score for _, score in documents]
    whole = TokenStore(write(folder / "whole", lengths, scores))
    before = filtered_store.BLOCK, filtered_store.STRETCH, filtered_store.KEPT_BLOCKS
    filtered_store.BLOCK, filtered_store.STRETCH, filtered_store.KEPT_BLOCKS = block, block * 2, 2
    try:
        store = FilteredStore(folder / "whole", DocumentFilter("score >= 1"))
        chosen = [row for row, score in enumerate(scores) if score == 1.0]
        offsets = [*whole.documents["offset"].tolist(), whole.num_tokens]
        tokens = np.concatenate([whole.read(offsets[row], offsets[row + 1]) for row in chosen])
        owners = np.repeat(chosen, np.array(lengths)[chosen])
        assert (store.num_tokens, store.num_documents) == (len(tokens), len(chosen))
        start = data.draw(st.integers(0, len(tokens) - 1))
        stop = data.draw(st.integers(start + 1, len(tokens)))
        assert store.read(start, stop).tolist() == tokens[start:stop].tolist()
        places = store.documents_in(start, stop)
        assert [place.number for place in places] == list(dict.fromkeys(owners[start:stop].tolist()))
        assert [place.date - 20200101 for place in places] == [place.number for place in places]
        assert store.sources[store.source_at(start)] == places[0].source
        assert store.num_windows(2) == (len(tokens) - 1) // 2
        for window in range(store.num_windows(2)):
            assert store.window(window, 2).tolist() == tokens[2 * window : 2 * window + 3].tolist()
    finally:
        filtered_store.BLOCK, filtered_store.STRETCH, filtered_store.KEPT_BLOCKS = before


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "s", [3, 4, 5], [0.1, 0.9, None])


def test_a_filtered_store_travels_to_workers_and_is_another_one(path):
    store = FilteredStore(path, DocumentFilter("score > 0.5"))
    content = pickle.dumps(store)
    assert len(content) < 1000
    again = pickle.loads(content)
    assert again.read(0, 4).tolist() == store.read(0, 4).tolist() == [3, 4, 5, 59_999]
    assert store.identity == f"{TokenStore(path).identity}, score > 0.5"
    with pytest.raises(ValueError, match="window 2 is not among the 1 it holds"):
        store.window(2, 3)


def test_documents_are_chosen_by_date_source_and_share(path):
    for text, numbers in (("date < 2020-01-02", [0]), ("source == odd", [1]), ("top 0.5 by score", [1])):
        store = FilteredStore(path, DocumentFilter(text))
        assert [place.number for place in store.documents_in(0, store.num_tokens)] == numbers


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "rank > 1",
            r"filter=rank > 1: rank is not kept in .*s, which has date, source, score; prepare it with --keep rank",
        ),
        ("score > 1", r"filter=score > 1: chooses none of the 3 documents"),
        ("score > high", r"filter=score > high: score is a number, and high is none"),
    ],
)
def test_a_filter_that_cannot_be_applied_is_refused(path, text, problem):
    with pytest.raises(ValueError, match=problem):
        FilteredStore(path, DocumentFilter(text))
