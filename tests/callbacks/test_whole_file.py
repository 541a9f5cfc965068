"""A small file is written whole, or is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import files_of_at_most

from lit_stable.callbacks.whole_file import write_whole


def test_a_disk_that_fills_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with files_of_at_most(100), pytest.raises(OSError, match=r"File too large: '.*a\.json'"):
        write_whole(path, "x" * 1000)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]
    write_whole(path, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "new")]
