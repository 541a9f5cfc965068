from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_fit import TinyData, TinyModule, quiet_trainer

from lit_stable.callbacks import DiskSpace, Events
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.disk_space import free_bytes
from lit_stable.callbacks.events import read_events

GIB = 1 << 30


def test_it_tells_once_when_it_falls_below_and_again_after_it_was_well_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([30, 19, 18, 21, 19, 23, 19])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free) * GIB))
    channel = Events()
    channel.folder = tmp_path
    trainer = quiet_trainer(channel, DiskSpace(min_free_gib=20.0), max_steps=7, log_every_n_steps=1)
    trainer.fit(TinyModule(), TinyData())
    events = read_events(tmp_path / "events.jsonl")
    assert [(e.kind, e.step, e.evidence["free_gib"]) for e in events] == [("disk_low", 2, 19.0), ("disk_low", 7, 19.0)]
    assert float(trainer.callback_metrics["stability/disk_free_gib"]) == 19.0


def test_a_folder_that_is_not_there_yet_is_where_its_parent_is(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_a_disk_that_cannot_be_asked_is_no_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Any) -> Any:
        raise OSError("gone")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    channel = Events()
    channel.folder = tmp_path
    quiet_trainer(channel, DiskSpace(), max_steps=1, log_every_n_steps=1).fit(TinyModule(), TinyData())
    assert not (tmp_path / "events.jsonl").exists()


def test_the_limit_must_be_above_0() -> None:
    with pytest.raises(MisconfigurationException, match=r"`DiskSpace\(min_free_gib=0\)`: must be above 0"):
        DiskSpace(min_free_gib=0)
