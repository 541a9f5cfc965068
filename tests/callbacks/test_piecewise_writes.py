"""Whose files are written piece by piece, when, and what everyone else's ``CheckpointIO`` gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lit_stable.callbacks.piecewise_writes import piecewise_writes


class ForeignIO(TorchCheckpointIO):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.given.append((checkpoint, path, storage_options))


@pytest.mark.parametrize("in_background", [False, True])
def test_lightnings_own_file_is_never_put_together_in_memory(
    in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("put together in memory")

    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", refuse)
    path, disk = tmp_path / "new" / "a.ckpt", TorchCheckpointIO()
    with piecewise_writes(disk, in_background) as deferred:
        disk.save_checkpoint({"weight": torch.ones(3)}, path)
    assert (path.exists(), len(deferred)) == ((False, 1) if in_background else (True, 0))
    for write in deferred:
        write()
    assert torch.load(path, weights_only=True, mmap=True)["weight"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("in_background", [False, True])
def test_options_of_storage_are_refused_by_lightning(in_background: bool, tmp_path: Path) -> None:
    with (
        pytest.raises(TypeError, match="storage_options"),
        piecewise_writes(disk := TorchCheckpointIO(), in_background),
    ):
        disk.save_checkpoint({}, tmp_path / "a.ckpt", {"any": 1})


@pytest.mark.parametrize("options", [None, {"any": 1}])
def test_a_foreign_io_gets_the_checkpoint_at_once_and_a_copy_in_the_background(options: Any) -> None:
    disk, live = ForeignIO(), {"weight": torch.zeros(3)}
    with piecewise_writes(disk, False) as deferred:
        disk.save_checkpoint(live, "now", options)
    assert deferred == []
    with piecewise_writes(disk, True) as deferred:
        disk.save_checkpoint(live, "later", options)
    live["weight"] += 1
    assert len(disk.given) == len(deferred) == 1
    deferred[0]()
    (now, *with_now), (later, *with_later) = disk.given
    assert now is live
    assert later["weight"].tolist() == [0, 0, 0]
    assert (with_now, with_later) == (["now", options], ["later", options])


def test_an_io_that_had_a_function_of_its_own_has_it_again() -> None:
    disk, called = TorchCheckpointIO(), []
    disk.save_checkpoint = own = lambda *_: called.append("own")
    with piecewise_writes(disk, True) as deferred:
        disk.save_checkpoint({}, "a")
    assert called == []
    deferred[0]()
    assert called == ["own"]
    assert disk.save_checkpoint is own
