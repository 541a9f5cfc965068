from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import Events, HangWatchdog
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.events import read_events


def stands_still_here(path: Path) -> None:
    """Until the watchdog has written, however slow the machine is."""
    for _ in range(1000):
        if path.exists() and "stands_still_here" in path.read_text():
            return
        time.sleep(0.03)


def test_a_hang_is_written_down_with_the_place_where_it_stands(tmp_path: Path, capfd: Any) -> None:
    channel, path = Events(), tmp_path / "hang-rank0.txt"
    channel.folder = tmp_path

    def hang(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 1:
            stands_still_here(path)

    trainer = quiet_trainer(channel, HangWatchdog(0.3), Watch("on_train_batch_start", hang), max_steps=2)
    trainer.fit(TinyModule(), TinyData())
    assert trainer.global_step == 2, "the run goes on"
    text = path.read_text()
    assert "thread MainThread:" in text
    assert text.index("MainThread") < text.index("stands_still_here")
    assert "stands_still_here" in capfd.readouterr().err
    for _ in range(100):  # the event follows the file
        if (tmp_path / "events.jsonl").exists():
            break
        time.sleep(0.03)
    event = read_events(tmp_path / "events.jsonl")[0]
    assert (event.kind, event.rank, event.step) == ("hang", 0, 2)
    assert event.evidence["file"] == str(path)


def test_a_run_that_moves_is_left_alone_and_no_thread_is_left(tmp_path: Path) -> None:
    channel = Events()
    channel.folder = tmp_path
    quiet_trainer(channel, HangWatchdog(600.0), max_steps=3).fit(TinyModule(), TinyData())
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "hang-watchdog"]


def test_a_folder_that_cannot_be_written_to_is_no_failure(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "taken").write_text("")
    channel = Events()
    channel.folder = tmp_path / "taken"
    watchdog = HangWatchdog(1.0)
    watchdog._tell(quiet_trainer(channel), 7.0)
    assert "no sign of life for 7 s" in capfd.readouterr().err


def test_seconds_must_be_above_0() -> None:
    with pytest.raises(MisconfigurationException, match=r"`HangWatchdog\(seconds=0\)`: must be above 0"):
        HangWatchdog(0)
