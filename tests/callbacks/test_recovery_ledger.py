from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import files_of_at_most

from lit_stable.callbacks.recovery_ledger import FILE, Entry, append, last_run, of_run, read_ledger


def entry(number: int, run: str = "a", action: str = "wait", **fields: object) -> Entry:
    return Entry(number, run, 0, 10 * number, action, **fields)


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [entry(1, why="spike", evidence={"value": 2.5}), entry(2, done={"dropped": [[0, 8]]})]
    append(tmp_path / "sub" / FILE, written[:1])
    append(tmp_path / "sub" / FILE, written[1:])
    assert read_ledger(tmp_path / "sub" / FILE) == written
    assert read_ledger(tmp_path / FILE) == []


def test_what_is_not_finite_is_written_too(tmp_path: Path) -> None:
    append(tmp_path / FILE, [entry(1, evidence={"value": float("nan")})])
    assert read_ledger(tmp_path / FILE)[0].evidence == {"value": "nan"}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_a_kill_cut_short_is_left_out_and_swallows_no_other(tmp_path: Path, cut: int) -> None:
    append(tmp_path / FILE, [entry(1), entry(2)])
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-cut])
    append(tmp_path / FILE, [entry(3)])
    numbers = [e.number for e in read_ledger(tmp_path / FILE)]
    assert numbers == ([1, 2, 3] if cut == 1 else [1, 3])  # the line break alone was missing


def test_on_a_full_disk_the_file_stays_as_it_was(tmp_path: Path) -> None:
    append(tmp_path / FILE, [entry(1)])
    before = (tmp_path / FILE).read_bytes()
    with files_of_at_most(len(before) + 40), pytest.raises(OSError, match="too large"):
        append(tmp_path / FILE, [entry(2)])
    assert (tmp_path / FILE).read_bytes() == before


def test_lines_of_several_runs_are_told_apart() -> None:
    entries = [entry(1, "a"), entry(1, "b"), entry(2, "a"), entry(2, "b")]
    assert [e.number for e in of_run(entries, "a")] == [1, 2]
    assert {e.run for e in last_run(entries)} == {"b"}
    assert last_run([]) == []


def test_the_same_decision_is_another_line_when_it_is_acted_upon() -> None:
    logged, done, old = (
        entry(1, action="rewind", done={"rung": 3, **more}) for more in ({"acted": False}, {"acted": True}, {})
    )
    assert logged.key != done.key == old.key
