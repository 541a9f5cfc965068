from __future__ import annotations

import math
from pathlib import Path

import pytest

from lit_stable.replay.comparison import differences, logged_values, noise, relative

A = {"loss": {1: 2.0, 2: 3.0}}
B = {"loss": {1: 2.0, 2: 3.0003}}


def test_noise_is_the_largest_difference_between_replays() -> None:
    assert noise([A, A]) == 0.0
    assert noise([A, A, B]) == pytest.approx(1e-4, rel=1e-3)


def test_only_what_exceeds_the_tolerance_is_a_difference() -> None:
    assert differences(B, A, 3e-4) == []
    (found,) = differences(B, A, 5e-5)
    assert (found.step, found.logged, found.replayed) == (2, 3.0003, 3.0)
    assert differences({"loss": {7: 1.0}}, A, 0.0) == []


def test_what_is_not_finite_differs_from_what_is() -> None:
    assert relative(math.nan, math.nan) == relative(math.inf, math.nan) == 0.0
    assert relative(math.nan, 1.0) == math.inf


def test_the_last_session_to_take_a_step_counts(tmp_path: Path) -> None:
    for number, value in ((1, 5.0), (2, 4.0)):
        (tmp_path / f"csv-{number:02d}").mkdir()
        (tmp_path / f"csv-{number:02d}" / "metrics.csv").write_text(f"step,loss\n3.0,{value}\n4.0,\n")
    assert logged_values(tmp_path, ["loss", "other"]) == {"loss": {3: 4.0}, "other": {}}


@pytest.mark.parametrize("content", [b"step,loss\n3,abc\n", b"step,loss\n3,\xff\n", b"step,loss\n1e999,2\n"])
def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "csv-01").mkdir()
    (tmp_path / "csv-01" / "metrics.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.csv: cannot be read \(.*\), so nothing can be compared with it"):
        logged_values(tmp_path, ["loss"])
