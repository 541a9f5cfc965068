from __future__ import annotations

import numpy as np
import pytest

from lit_stable.data import columns
from lit_stable.data.columns import Column, ColumnBuilder, column_of


def test_values_become_numbers_or_codes_with_gaps():
    numbers = column_of("score", [1.5, None, 2.0])
    assert [numbers.value(row) for row in range(3)] == [1.5, None, 2.0]
    assert numbers.known.tolist() == [True, False, True]
    texts = column_of("lang", ["de", None, "en", "de"])
    assert texts.texts == ["de", "en"]
    assert [texts.take(slice(1, 4)).value(row) for row in range(3)] == [None, "en", "de"]
    assert column_of("score", [None, None]) is None


def test_joined_codes_follow_the_first_appearance_of_texts():
    builder = ColumnBuilder("lang")
    first = builder.add(Column(np.array([2, -1, 0, 2]), ["a", "never used", "c"]))
    second = builder.add(Column(np.array([1, 0, -1]), ["a", "d"]))
    assert list(builder.texts) == ["c", "a", "d"]
    assert first.tolist() == [0, -1, 1, 0]
    assert second.tolist() == [2, 1, -1]
    assert ColumnBuilder("score").add(Column(np.array([1.0, np.nan]))).tolist()[0] == 1.0


def test_two_kinds_and_too_many_texts_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"keep=k: is a number in some documents and a text in others, as 'a'"):
        column_of("k", [1.0, "a"])
    builder = ColumnBuilder("k")
    builder.add(Column(np.array([1.0])))
    with pytest.raises(ValueError, match=r"keep=k: is a number in some documents"):
        builder.add(Column(np.array([0]), ["a"]))
    monkeypatch.setattr(columns, "MOST_TEXTS", 2)
    with pytest.raises(ValueError, match=r"keep=url: has more than 2 different texts"):
        column_of("url", ["a", "b", "c"])
    builder = ColumnBuilder("url")
    builder.add(Column(np.array([0, 1]), ["a", "b"]))
    with pytest.raises(ValueError, match=r"keep=url: has more than 2 different texts"):
        builder.add(Column(np.array([0]), ["c"]))
