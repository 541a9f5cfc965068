from __future__ import annotations

import pytest

from lit_stable.callbacks.step_ranges import parse_steps


def test_a_range_and_a_single_step():
    assert [parse_steps(request) for request in ("13251-14000", " 3 - 5 ", "7", 7)] == [
        (13_251, 14_000),
        (3, 5),
        (7, 7),
        (7, 7),
    ]


@pytest.mark.parametrize("request_", ["5-3", "0", "0-4", "a", "1-2-3", "", -1])
def test_what_is_no_range_is_refused(request_):
    with pytest.raises(ValueError, match=r"must be a step or FIRST-LAST with 1 <= FIRST <= LAST, as 13251-14000\."):
        parse_steps(request_)
