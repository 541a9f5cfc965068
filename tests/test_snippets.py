"""Programs that stand in the documentation run as they stand."""

from __future__ import annotations

import os
import re
from pathlib import Path

from forked import Script

from lit_stable.callbacks.recovery_ledger import FILE, read_ledger

ROOT = Path(__file__).resolve().parents[1]


def run(page: str, folder: Path) -> str:
    """What the one program of a page says: the snippet that has a trainer fit."""
    (program,) = [s for s in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S) if "fit" in s]
    script = folder / "program.py"
    script.write_text(program)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Script(script, [], {**os.environ, "PYTHONPATH": path}, folder).said()


def test_callbacks_in_a_project_of_ones_own(tmp_path: Path) -> None:
    assert "stability/grad_norm" in run("README.md", tmp_path)


def test_the_recovery_ladder_in_a_script_of_ones_own(tmp_path: Path) -> None:
    said = run("docs/recovery.md", tmp_path)
    assert "Recovery: step 203: not finite: the loss is nan; the run goes back to step 100" in said
    ledger = tmp_path / "own_run" / FILE
    entries = read_ledger(ledger)
    assert [entry.done["to"] for entry in entries if entry.action == "rewind"] == [100]
    assert max(entry.step for entry in entries if entry.action == "checkpoint") == 300
    assert "step=300" in run("docs/recovery.md", tmp_path), "where it was"
    assert read_ledger(ledger) == entries, "nothing is left to do"
