from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_stable.callbacks.clip_schedule import check_stages, norm_at

# OPT-175B's: 2.5, then 1.5, then 1.0.
STAGES: list[dict[str, Any]] = [{"from": 4000, "max_norm": 1.5}, {"from": 5500, "max_norm": 1.0}]


def test_a_stage_holds_from_its_mark_until_the_next() -> None:
    stages = check_stages(STAGES, before=2.5)
    assert stages == [(0, 2.5), (4000, 1.5), (5500, 1.0)]
    assert [norm_at(stages, at) for at in (0, 3999, 4000, 5499, 5500, 10**9)] == [2.5, 2.5, 1.5, 1.5, 1.0, 1.0]


def test_a_schedule_from_the_start_needs_no_norm_before_it() -> None:
    assert check_stages([{"from": 0, "max_norm": 1.0}, {"from": 9, "max_norm": 0.3}], None) == [(0, 1.0), (9, 0.3)]


@pytest.mark.parametrize(
    ("stages", "before", "message"),
    [
        ([], 1.0, r"`GradClip`: schedule=\[\]: must have at least one stage"),
        ([{"from": 0, "norm": 1.0}], None, r"schedule\[0\]=.*: must have exactly the keys from and max_norm"),
        ([{"from": 5, "max_norm": 0.0}], 1.0, r"schedule has max_norm=0.0: must be a finite number > 0"),
        ([{"from": 5, "max_norm": float("nan")}], 1.0, r"schedule has max_norm=nan: must be"),
        ([{"from": -1, "max_norm": 1.0}], 1.0, r"from=\[-1\]: must be 0 or more and increase"),
        ([STAGES[1], STAGES[0]], 2.5, r"from=\[5500, 4000\]: must be 0 or more and increase"),
        ([STAGES[0], STAGES[0]], 2.5, r"from=\[4000, 4000\]: must be 0 or more and increase"),
        (STAGES, None, r"schedule begins at 4000: give max_norm for what comes before, or a stage from 0"),
        ([{"from": 0, "max_norm": 1.0}], 2.5, r"max_norm=2.5: would never hold, .* delete max_norm"),
    ],
)
def test_a_malformed_schedule_is_refused(stages: Any, before: float | None, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        check_stages(stages, before)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(MisconfigurationException, match=r"(?s)max_norm=-1.*from=\[3, 2\]"):
        check_stages([{"from": 3, "max_norm": -1}, {"from": 2, "max_norm": 1}], 1.0)
