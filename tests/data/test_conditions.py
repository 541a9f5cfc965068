from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_stable.data.columns import column_of
from lit_stable.data.conditions import DocumentFilter, filter_problem, nth_largest

VALUES = {
    "score": [0.1, 0.5, None, 0.9, 0.5],
    "lang": ["de", "en", "en", None, "fr"],
    "date": [20200101.0, 20220701.0, 20220630.0, None, 20230101.0],
}


def chosen(text: str) -> list[int]:
    """The documents that a filter chooses when it has seen them in two stretches."""
    stretches = [lambda key, rows=rows: column_of(key, VALUES[key]).take(rows) for rows in (slice(0, 2), slice(2, 5))]
    settled = DocumentFilter(text).settle(lambda: stretches)
    masks = [settled.mask(values, count) for values, count in zip(stretches, (2, 3), strict=True)]
    return np.flatnonzero(np.concatenate(masks)).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score >= 0.5", [1, 3, 4]),
        ("score > 0.5", [3]),
        ("score < 0.5", [0]),
        ("score <= 0.5", [0, 1, 4]),
        ("score == 0.5", [1, 4]),
        ("score != 0.5", [0, 3]),
        ("lang == en", [1, 2]),
        ("lang != 'en'", [0, 4]),
        ("lang == it", []),
        ("lang != it", [0, 1, 2, 4]),
        ("date < 2022-07-01", [0, 2]),
        ("date>=20220701", [1, 4]),
        ("top 0.25 by score", [3]),
        ("top 0.3 by score", [1, 3, 4]),
        ("top 1 by score", [0, 1, 3, 4]),
        ("score >= 0.5 and lang == en", [1]),
        ("top 0.5 by score  and date < 2023-01-01", [1]),
    ],
)
def test_a_filter_chooses_by_value_and_never_without_one(text, expected):
    assert chosen(text) == expected


@given(
    numbers=st.lists(st.floats(allow_nan=False), min_size=1, max_size=40),
    data=st.data(),
)
def test_a_rank_is_found_as_by_sorting(numbers, data):
    rank = data.draw(st.integers(1, len(numbers)))
    cut = data.draw(st.integers(0, len(numbers)))
    array = np.array(numbers)
    assert nth_largest(lambda: [array[:cut], array[cut:]], rank) == sorted(numbers, reverse=True)[rank - 1]


@given(share=st.sampled_from(["0.1", "0.3", "0.5", "0.999", "1"]), count=st.integers(1, 60))
def test_the_best_share_is_at_least_that_share(share, count):
    values = column_of("score", [float(n) for n in range(count)])
    settled = DocumentFilter(f"top {share} by score").settle(lambda: [lambda key: values])
    assert settled.mask(lambda key: values, count).sum() == math.ceil(round(float(share) * count, 9))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("score", r"filter=score: must read KEY >= VALUE"),
        ("score >= 1 and", "filter=: must read KEY >= VALUE"),
        ("top 0 by score", r"filter=top 0 by score: the share must be above 0"),
        ("top 1.5 by score", "the share must be above 0 and at most 1"),
        ("top 1.2.3 by score", "the share must be above 0 and at most 1"),
        ("date >= yesterday", r"filter=date >= yesterday: the value must be a date, YYYY-MM-DD"),
    ],
)
def test_what_is_no_filter_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        chosen(text)
    assert filter_problem(text)
    assert filter_problem("score >= 1") is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lang > de", r"filter=lang > de: lang is a text; texts are compared by == and !="),
        ("score >= high", r"filter=score >= high: score is a number, and high is none"),
        ("top 0.3 by lang", r"filter=top 0\.3 by lang: lang is a text, and texts have no order"),
    ],
)
def test_kinds_must_fit(text, problem):
    with pytest.raises(ValueError, match=problem):
        chosen(text)


def test_the_best_of_nothing_is_refused():
    empty = column_of("score", [1.0]).take(slice(0, 0))
    with pytest.raises(ValueError, match="no document has a value for score"):
        DocumentFilter("top 0.3 by score").settle(lambda: [lambda key: empty])
