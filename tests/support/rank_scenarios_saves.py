"""Sharded checkpoints that are written while two ranks train; run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import errno
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback
from rank_scenarios import fit2, fsdp1, main, rank, scenario, shared_folder
from rank_scenarios_eight_bit import eight_bit
from tiny_gpt_run import whole_weights
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lit_stable.callbacks import Progress, SafeCheckpoints, sharded_save
from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.checkpoint_files import damage, size_on_disk
from lit_stable.callbacks.deferred_shards import DeferredShards
from lit_stable.run.checkpoints import Checkpoints

SAVED_AT, STEPS = 2, 4


class Save(Callback):
    """Saves behind step 2, and says of every later step whether the checkpoint is there and still being written."""

    def __init__(self, path: Path, at_the_last: Any = None) -> None:
        self.path, self.at_the_last = path, at_the_last
        self.seen: list[tuple[bool, bool]] = []
        self.weights: dict[str, torch.Tensor] = {}  # of the step that is saved
        self._saved = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        progress = Progress.of(trainer)
        if progress.pending_samples or progress.steps < SAVED_AT:
            return
        if not self._saved:
            self._saved = True
            self.weights = whole_weights(pl_module)
            trainer.save_checkpoint(self.path)
            return
        guard = next(c for c in trainer.callbacks if isinstance(c, SafeCheckpoints))
        self.seen.append((self.path.exists(), guard.is_writing))
        if progress.steps == STEPS and self.at_the_last is not None:
            self.at_the_last()


def content(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a sharded checkpoint, whole, by name."""
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items() if hasattr(e, "size")}
    load(tensors, checkpoint_id=path)
    return tensors


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def held_back() -> tuple[threading.Event, Any]:
    """An event, and a patch by which this rank's thread writes when it is set."""
    may_write, write = threading.Event(), DeferredShards.write

    def wait_and_write(shards: DeferredShards) -> Any:
        assert may_write.wait(60)
        return write(shards)

    return may_write, mock.patch.object(DeferredShards, "write", wait_and_write)


def _goes_on(strategy: Callable[[], Any]) -> dict[str, Any]:
    folder = shared_folder()
    options: dict[str, Any] = {"dropout": 0.1, "validates": False, "steps": STEPS}
    may_write, patch = held_back()
    saving = Save(folder / "background.ckpt", may_write.set)
    with patch:
        behind = fit2(strategy(), callbacks=(saving,), in_background=True, **options)
    at_once = fit2(strategy(), callbacks=(Save(folder / "at_once.ckpt"),), **options)
    written, expected = content(saving.path), content(folder / "at_once.ckpt")
    resumed = fit2(strategy(), ckpt_path=saving.path, **options)
    return {
        "seen": saving.seen,
        "rows": behind.rows == at_once.rows,
        "names": names(saving.path),
        "damage": damage(saving.path),
        "same": written.keys() == expected.keys() and all(torch.equal(written[n], expected[n]) for n in expected),
        "weights": all(torch.equal(written.get(f"state_dict.{n}", w), w) for n, w in saving.weights.items()),
        "tensors": len(written),
        "grown": size_on_disk(saving.path) / size_on_disk(folder / "at_once.ckpt"),
        "resumed": resumed.rows == behind.rows[SAVED_AT:],
    }


@scenario
def goes_on_fsdp2() -> dict[str, Any]:
    return _goes_on(lambda: "fsdp2")


@scenario
def goes_on_fsdp() -> dict[str, Any]:
    return _goes_on(fsdp1)


def _one_file(strategy: str) -> dict[str, Any]:
    """Rank 0 alone has something to write later, and the others go on."""
    folder = shared_folder()
    options: dict[str, Any] = {"dropout": 0.1, "validates": False, "steps": STEPS}
    behind = fit2(strategy, callbacks=(Save(folder / "background.ckpt"),), in_background=True, **options)
    at_once = fit2(strategy, callbacks=(Save(folder / "at_once.ckpt"),), **options)
    resumed = fit2(strategy, ckpt_path=folder / "background.ckpt", **options)
    return {
        "rows": behind.rows == at_once.rows,
        "left": names(folder),
        "damage": damage(folder / "background.ckpt"),
        "resumed": resumed.rows == behind.rows[SAVED_AT:],
    }


@scenario
def one_file_ddp() -> dict[str, Any]:
    return _one_file("ddp")


@scenario
def one_file_fsdp2_full() -> dict[str, Any]:
    return _one_file("fsdp2_full")


@scenario
def several_in_a_row_with_eight_bits() -> dict[str, Any]:
    """Each waits for the one before, and takes the same name; EightBitAdam's states lie beside the weights."""
    folder = shared_folder()
    path = folder / "a.ckpt"

    class SaveAlways(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(path)

    options = {"validates": False, "steps": 3}
    straight = fit2("fsdp2", callbacks=(eight_bit(),), **options)
    saving = fit2("fsdp2", callbacks=(eight_bit(), SaveAlways()), in_background=True, **options)
    dtypes = {tensor.dtype for tensor in content(path).values()}
    return {
        "rows": straight.rows == saving.rows,
        "left": names(folder),
        "step": torch.load(path / "meta.pt", weights_only=False)["global_step"],
        "eight_bit": torch.uint8 in dtypes,
        "damage": damage(path),
    }


def _fails(write: Any, *more: Callback) -> dict[str, Any]:
    """What both ranks raise, what they warn of, and what is left, when a thread writes by ``write``."""
    folder, told = shared_folder(), ""
    (folder / "before.ckpt").mkdir(exist_ok=True)
    callbacks = (Save(folder / "a.ckpt"), *more)
    with mock.patch.object(DeferredShards, "write", write), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            fit2("fsdp2", steps=STEPS, validates=False, in_background=True, callbacks=callbacks)
        except (CheckpointError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
    said = [str(w.message) for w in warned if "a.ckpt" in str(w.message)]
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, (told.replace(str(folder), "HERE"), said))
    return {"told": [told for told, _ in everyone], "said": [said for _, said in everyone], "left": names(folder)}


@scenario
def a_part_that_cannot_be_written() -> dict[str, Any]:
    write = DeferredShards.write

    def full(shards: DeferredShards) -> Any:
        if rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(shards)

    return _fails(full)


class Trouble(Callback):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if Progress.of(trainer).steps == SAVED_AT + 1:
            raise ValueError("of training")


@scenario
def training_fails_and_a_part_does_not_come() -> dict[str, Any]:
    """Rank 0 gives up soon; rank 1, which stands for one that hangs, ends a while later."""
    slow, write = 0.0 if rank() == 0 else 3.0, DeferredShards.write

    def late(shards: DeferredShards) -> Any:
        time.sleep(slow)
        return write(shards)

    with mock.patch.object(sharded_save, "_PATIENCE", 0.3):
        return _fails(late, Trouble())


@scenario
def training_fails_and_all_parts_come() -> dict[str, Any]:
    write = DeferredShards.write

    def late(shards: DeferredShards) -> Any:
        time.sleep(0.3)
        return write(shards)

    return _fails(late, Trouble())


@scenario
def ended_in_mid_window() -> dict[str, Any]:
    """Told to stop behind a micro-batch of step 3: step 2 is saved by both, and gone on from."""
    folder = shared_folder()

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = Progress.of(trainer).steps == SAVED_AT and Progress.of(trainer).pending_samples > 0

    saves = Checkpoints(every_steps=100, first_step=None)
    saves.folder = folder
    options: dict[str, Any] = {"dropout": 0.1, "validates": False, "steps": STEPS, "in_background": True}
    fit2("fsdp2", callbacks=(Stop(), saves), **options)
    path = saves.last()
    straight, resumed = fit2("fsdp2", **options), fit2("fsdp2", ckpt_path=path, **options)
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, resumed.rows == straight.rows[SAVED_AT:])
    return {"left": names(folder / "checkpoints"), "damage": damage(path), "same": everyone}


if __name__ == "__main__":
    main()
