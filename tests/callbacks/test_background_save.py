"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import errno
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
from tiny_gpt_run import equal_bits
from tiny_gpt_run import fit as fit_gpt

from lit_stable.callbacks import Progress, SafeCheckpoints
from lit_stable.callbacks.background_save import BackgroundSave
from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.checkpoint_files import damage
from lit_stable.callbacks.deferred_shards import DeferredShards
from lit_stable.callbacks.safe_checkpoints import wait_for_saves

STEPS, SAVED_AT = 6, 2


class SlowDisk(TorchCheckpointIO):
    """Writes when it is told to, and fails with what it is given."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.may_write, self.failure = threading.Event(), failure

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert self.may_write.wait(60)
        if self.failure is not None:
            raise self.failure
        super().save_checkpoint(checkpoint, path, storage_options)


def fit(
    path: Path, disk: SlowDisk, *callbacks: Any, in_background: bool = True, at: tuple[int, ...] = (SAVED_AT,)
) -> Any:
    def save(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step in at:
            trainer.save_checkpoint(path)

    saves = Watch("on_train_batch_end", save)
    guard = SafeCheckpoints(in_background)
    trainer = quiet_trainer(guard, Progress(), saves, *callbacks, max_steps=STEPS, plugins=[disk])
    module = TinyModule()
    trainer.fit(module, TinyData())
    return module


def test_training_goes_on_while_the_state_of_the_step_is_written(tmp_path: Path) -> None:
    disk, on_disk = SlowDisk(), []

    def look(trainer: Trainer, *rest: Any) -> None:
        on_disk.append((tmp_path / "a.ckpt").exists())
        if trainer.global_step == STEPS:
            disk.may_write.set()

    module = fit(tmp_path / "a.ckpt", disk, Watch("on_train_batch_end", look))
    assert on_disk == [False] * STEPS, "it could not be written before the last step"
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"], "the end of the fit waits for it"

    at_once = SlowDisk()
    at_once.may_write.set()
    same = fit(tmp_path / "b.ckpt", at_once, in_background=False)
    assert equal_bits(same.state_dict(), module.state_dict())
    written, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("a.ckpt", "b.ckpt"))
    torch.testing.assert_close(written.pop("state_dict"), expected.pop("state_dict"), rtol=0, atol=0)
    torch.testing.assert_close(written.pop("optimizer_states"), expected.pop("optimizer_states"), rtol=0, atol=0)
    assert written["global_step"] == SAVED_AT
    assert written.keys() == expected.keys()
    assert written["loops"] == expected["loops"]


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    disk = SlowDisk()
    threading.Timer(0.2, disk.may_write.set).start()
    fit(tmp_path / "a.ckpt", disk, at=(2, 3))
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 3


def test_a_write_that_fails_is_told_where_it_is_waited_for_and_leaves_nothing(tmp_path: Path) -> None:
    disk = SlowDisk(OSError(errno.ENOSPC, "No space left on device"))
    disk.may_write.set()
    with pytest.raises(CheckpointError, match=r"a\.ckpt: could not be written \(No space left on device"):
        fit(tmp_path / "a.ckpt", disk)
    assert list(tmp_path.iterdir()) == []


def test_a_path_is_of_the_folder_that_the_process_was_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, elsewhere = SlowDisk(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)

    def leave(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == SAVED_AT + 1:
            monkeypatch.chdir(elsewhere)
            disk.may_write.set()

    fit(Path("a.ckpt"), disk, Watch("on_train_batch_end", leave))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.ckpt", "elsewhere"]
    assert list(elsewhere.iterdir()) == []


def test_a_failure_is_raised_once() -> None:
    def fail() -> None:
        raise OSError("gone")

    background = BackgroundSave()
    background.begin(fail)
    with pytest.raises(OSError, match="gone"):
        background.finish()
    background.finish()
    assert not background.is_under_way


def test_whoever_looks_for_checkpoints_can_wait_for_them(tmp_path: Path) -> None:
    disk, seen = SlowDisk(), []

    def look(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 4:
            (guard,) = (c for c in trainer.callbacks if isinstance(c, SafeCheckpoints))
            seen.append((guard.is_writing, (tmp_path / "a.ckpt").exists()))
            disk.may_write.set()
            wait_for_saves(trainer)
            seen.append((guard.is_writing, (tmp_path / "a.ckpt").exists()))

    fit(tmp_path / "a.ckpt", disk, Watch("on_train_batch_end", look))
    assert seen == [(True, False), (False, True)]


class WritesInItsOwnWay(SingleDeviceStrategy):
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        Path(filepath).mkdir()
        (Path(filepath) / "all").write_text("of it")


def test_what_a_strategy_writes_in_its_own_way_is_written_at_once_and_that_is_said_once(tmp_path: Path) -> None:
    def save(trainer: Trainer, *rest: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
        assert (tmp_path / f"{trainer.global_step}.ckpt" / "all").is_file()

    guard, strategy = SafeCheckpoints(in_background=True), WritesInItsOwnWay()
    trainer = quiet_trainer(guard, Progress(), Watch("on_train_batch_end", save), max_steps=3, strategy=strategy)
    with pytest.warns(UserWarning, match=r"in_background=True: WritesInItsOwnWay writes a checkpoint in") as warned:
        trainer.fit(TinyModule(), TinyData())
    assert sum("in_background" in str(w.message) for w in warned) == 1


def test_the_shards_of_one_device_are_written_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, seen = threading.Event(), []
    write = DeferredShards.write
    monkeypatch.setattr(DeferredShards, "write", lambda shards: may_write.wait(60) and write(shards))

    def look(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 0:
            return
        if not seen:
            trainer.save_checkpoint(tmp_path / "a.ckpt")
        seen.append((tmp_path / "a.ckpt").exists())
        if trainer.global_step == 3:
            may_write.set()

    fit_gpt("fsdp2", steps=3, validates=False, in_background=True, callbacks=(Watch("on_train_batch_end", look),))
    assert not any(seen), "it could not be written before the last step"
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"], "the end of the fit waits for it"
    names = ["meta.pt", ".metadata", "__0_0.distcp", "checksums.json"]
    assert sorted(path.name for path in (tmp_path / "a.ckpt").iterdir()) == sorted(names)
    assert damage(tmp_path / "a.ckpt") is None


def test_the_interpreter_waits_for_what_is_being_written() -> None:
    background = BackgroundSave()
    background.begin(lambda: time.sleep(0.05))
    assert background._thread is not None
    assert not background._thread.daemon
    background.finish()


def test_what_a_new_one_stands_in_for_stays_until_that_is_on_disk(tmp_path: Path) -> None:
    """`ModelCheckpoint` removes the one before as soon as a save returns: a kill would have left none."""
    disk, there = SlowDisk(), []
    disk.may_write.set()

    def look(trainer: Trainer, *rest: Any) -> None:
        there.append(sorted(path.name for path in tmp_path.glob("*.ckpt")))

    def hold(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 1:
            wait_for_saves(trainer)
            disk.may_write.clear()
        elif trainer.global_step == 2:
            disk.may_write.set()

    keeper = ModelCheckpoint(tmp_path, "{step}", save_top_k=1, every_n_train_steps=1)
    callbacks = Watch("on_train_batch_start", hold), keeper, Watch("on_train_batch_start", look)
    guard = SafeCheckpoints(in_background=True)
    trainer = quiet_trainer(guard, Progress(), *callbacks, max_steps=3, plugins=[disk], enable_checkpointing=True)
    trainer.fit(TinyModule(), TinyData())
    assert there[2][0] == "step=1.ckpt"
    assert [path.name for path in tmp_path.iterdir()] == ["step=3.ckpt"]


def test_the_first_in_a_new_folder_can_be_linked_to_before_it_is_on_disk(tmp_path: Path) -> None:
    disk, last, found = SlowDisk(), tmp_path / "new" / "last.ckpt", []

    def look(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 1:
            found.append((last.is_symlink(), last.exists()))
            disk.may_write.set()

    keeper = ModelCheckpoint(last.parent, "{step}", every_n_train_steps=1, save_top_k=-1, save_last="link")
    callbacks = SafeCheckpoints(in_background=True), keeper, Watch("on_train_batch_start", look)
    trainer = quiet_trainer(*callbacks, max_steps=2, plugins=[disk], enable_checkpointing=True)
    trainer.fit(TinyModule(), TinyData())
    assert found == [(True, False)]
    assert torch.load(last, weights_only=True)["global_step"] == 2


def test_nothing_is_removed_for_one_that_failed(tmp_path: Path) -> None:
    background, removed = BackgroundSave(), []
    background.then(lambda: removed.append("before any"))

    def fail() -> None:
        raise OSError("gone")

    background.begin(fail)
    background.then(lambda: removed.append("for it"))
    with pytest.raises(OSError, match="gone"):
        background.finish()
    background.begin(lambda: None)
    background.then(lambda: removed.append("for the next"))
    background.finish()
    assert removed == ["before any", "for the next"]


def test_a_failed_write_is_told_beside_an_error_of_training(tmp_path: Path) -> None:
    disk = SlowDisk(OSError(errno.ENOSPC, "No space left on device"))

    def fail(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == SAVED_AT + 1:
            disk.may_write.set()
            raise ValueError("of training")

    with (
        pytest.warns(UserWarning, match=r"SafeCheckpoints, after ValueError: \S+a\.ckpt: could not be written"),
        pytest.raises(ValueError, match="of training"),
    ):
        fit(tmp_path / "a.ckpt", disk, Watch("on_train_batch_end", fail))


def test_a_failed_write_is_told_after_the_next_batch_not_at_the_next_save(tmp_path: Path) -> None:
    disk, steps = SlowDisk(OSError(errno.ENOSPC, "No space left on device")), []

    def let_it_fail(trainer: Trainer, *rest: Any) -> None:
        steps.append(trainer.global_step)
        if trainer.global_step == 3:
            disk.may_write.set()
            guard = next(c for c in trainer.callbacks if isinstance(c, SafeCheckpoints))
            while guard.is_writing:
                time.sleep(0.001)

    with pytest.raises(CheckpointError, match="could not be written"):
        fit(tmp_path / "a.ckpt", disk, Watch("on_train_batch_start", let_it_fail))
    assert steps[-1] == 3


def test_a_save_in_the_background_leaves_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.ckpt", "b.ckpt"):
        fit(tmp_path / name, TorchCheckpointIO(), in_background=name == "a.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()


def test_a_second_interrupt_while_a_write_is_waited_for_does_not_lose_it() -> None:
    """Python 3.11 takes a thread whose `join` was interrupted for ended: old files went before the new was there."""
    background, may_write, done = BackgroundSave(), threading.Event(), []

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        background.begin(lambda: done.append(may_write.wait(60)))
        background.then(lambda: done.append("removed"))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            background.finish()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert background.is_under_way
    may_write.set()
    background.finish()
    assert done == [True, "removed"]
