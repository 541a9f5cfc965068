from __future__ import annotations

import datetime

import pytest

from lit_stable.data.text.documents import Document, Fields, document_of, parse_date

FIELDS = Fields("s", keep=("score", "meta.lang"))


def test_a_record_gives_text_source_date_and_kept_values():
    record = {"text": "a", "source": "web", "date": "2024-02-29T12:00:00Z", "score": 1, "meta": {"lang": "en"}, "x": []}
    assert document_of(record, FIELDS) == Document("a", "web", 20240229, (1.0, "en"))
    assert document_of({"text": "b", "date": 19991231, "source": None}, FIELDS) == Document(
        "b", "s", 19991231, (None, None)
    )


def test_a_flat_key_may_hold_a_dot_and_a_missing_number_is_none():
    assert document_of({"text": "a", "meta.lang": "fr", "score": float("nan")}, FIELDS).values == (None, "fr")
    assert document_of({"text": "a", "meta": "no object", "score": True}, FIELDS).values == (1.0, None)


def test_other_keys_may_hold_text_and_date():
    fields = Fields("s", text_key="content", date_key="timestamp")
    record = {"content": "a", "timestamp": datetime.datetime(2020, 1, 2, 3, 4)}
    assert document_of(record, fields) == Document("a", "s", 20200102)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([1], 'must be an object with a string "text"'),
        ({"text": 3}, 'must be an object with a string "text"'),
        ({"text": "a\ud800"}, '"text" holds half of a surrogate pair'),
        ({"text": "a", "source": 3}, "source=3 must be a string"),
        ({"text": "a", "date": "yesterday"}, "date='yesterday' must be YYYY-MM-DD or yyyymmdd"),
        ({"text": "a", "date": "2024-13-01"}, "date='2024-13-01' must be"),
        ({"text": "a", "score": [1]}, r"score=\[1\] must be a number or a text to be kept"),
        ({"text": "a", "score": 2**60}, r"score=\d+ must be at most 2\^53"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(record, problem):
    with pytest.raises(ValueError, match=problem):
        document_of(record, FIELDS)


def test_dates_are_read_from_text_and_numbers():
    assert [parse_date(v) for v in (None, 0, "2022-07-01", 20220701, datetime.date(2022, 7, 1))] == [0, 0] + [
        20220701
    ] * 3
