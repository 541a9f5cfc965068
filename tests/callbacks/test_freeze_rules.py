from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_stable.callbacks.freeze_rules import Rule, check_rules


def test_what_is_left_out_means_all_norms_for_good() -> None:
    (rule,) = check_rules([{}])
    assert rule == Rule(("*",), "only", 0, None)
    assert rule.for_good
    assert rule.holds(0)
    assert rule.holds(10**9)


def test_a_window_holds_from_its_start_until_just_before_its_stop() -> None:
    (rule,) = check_rules([{"start": 2, "stop": 4}])
    assert [rule.holds(progress) for progress in range(6)] == [False, False, True, True, False, False]
    assert not rule.for_good
    assert not check_rules([{"start": 2}])[0].for_good


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"module": ["a"]}, r"rules\[0\]\)`: unknown key 'module'; the keys are modules, norms, start, stop"),
        ({"modules": "a"}, r"modules='a': must be a list of at least one pattern"),
        ({"modules": []}, r"modules=\[\]: must be a list"),
        ({"norms": "all"}, r"norms='all': must be only, except or with"),
        ({"start": -1}, r"start=-1: must be 0 or more"),
        ({"start": 3, "stop": 3}, r"stop=3: must be greater than start=3"),
    ],
)
def test_a_malformed_rule_is_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        check_rules([rule])


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(MisconfigurationException, match=r"(?s)rules\[0\].*start=-1.*rules\[1\].*norms='x'"):
        check_rules([{"start": -1}, {"norms": "x"}])


def test_no_rule_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"rules=\[\]\)`: freezes nothing"):
        check_rules([])
