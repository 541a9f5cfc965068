"""Two ranks that were started as differently as two hosts can be; run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_scenarios import fit2, main, rank, scenario, shared_folder
from tiny_gpt_run import SaveEveryMicroBatch
from tiny_recipe import command, write_recipe

from lit_stable.callbacks import shared_folder as shared_folder_
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.rank_gather import gather_objects
from lit_stable.data.prepare import prepare
from lit_stable.run import alike_ranks
from lit_stable.strategies.mesh import MeshOptions


def _recipe(folder: Path, **changes: Any) -> Path:
    """A recipe of this rank, its data too."""
    own = folder / f"node-{rank()}"
    own.mkdir()
    strategy = {"trainer__strategy": "ddp", "run__root": str(folder / "runs")}
    return write_recipe(own, **{**strategy, **changes})


def _said(folder: Path, *words: Any, **changes: Any) -> dict[str, Any]:
    """What ``fit`` came to on both ranks, and the run folders that are left."""
    with mock.patch.object(shared_folder_, "PATIENCE", 0.2):
        done = command("fit", "--config", _recipe(folder, **changes), "--trainer.max_steps", "2", *words)
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("tiny/*"))
    return {"codes": gather_objects(done.code), "said": gather_objects(done.err or done.out), "left": left}


@scenario
def copies_of_one_recipe_and_its_data() -> dict[str, Any]:
    return _said(shared_folder())


@scenario
def learning_rates_that_differ() -> dict[str, Any]:
    return _said(shared_folder(), "--model.schedule.peak", 0.01 * (1 + rank()))


@scenario
def features_that_differ() -> dict[str, Any]:
    return _said(shared_folder(), *(["--stability.grad_spike_skip", "{}"] if rank() else []))


@scenario
def meshes_that_differ() -> dict[str, Any]:
    return _said(shared_folder(), "--mesh.reshard_after_forward", rank() == 0, trainer__strategy="fsdp2")


@scenario
def strategies_that_differ() -> dict[str, Any]:
    return _said(shared_folder(), trainer__strategy=("fsdp2", "ddp")[rank()])


@scenario
def code_that_differs() -> dict[str, Any]:
    with mock.patch.object(alike_ranks, "code_digest", return_value=f"abc{rank()}"):
        return _said(shared_folder())


@scenario
def orders_that_differ() -> dict[str, Any]:
    folder = shared_folder()
    own = folder / f"node-{rank()}" / "store" / "validation"
    names = ("a", "b") if rank() else ("b", "a")
    return _said(folder, "--data.validation", str({name: str(own) for name in names}))


@scenario
def tokenizers_that_differ() -> dict[str, Any]:
    folder = shared_folder()
    recipe = _recipe(folder)
    for index in (recipe.parent / "store").glob("*/index.json"):
        index.write_text(index.read_text().replace('"tokenizer_sha256": "', f'"tokenizer_sha256": "{rank()}'))
    done = command("fit", "--config", recipe)
    return {"codes": gather_objects(done.code), "said": gather_objects(done.err), "left": []}


@scenario
def data_that_differ() -> dict[str, Any]:
    folder = shared_folder()
    words = ["--data.sources.text.path", str(_other_data(folder))] if rank() else []
    return _said(folder, *words)


def _other_data(folder: Path) -> Path:
    (folder / "other.txt").write_text("\n\n".join(f"document {number} of a host" for number in range(200)))
    prepare([folder / "other.txt"], folder / "other", "bytes", 0.1, "\n\n", report=lambda line: None)
    return folder / "other"


@scenario
def data_that_are_damaged() -> dict[str, Any]:
    folder = shared_folder()
    recipe = _recipe(folder)
    if rank():
        (recipe.parent / "store" / "train" / "documents.bin").write_bytes(b"")
    done = command("fit", "--config", recipe)
    return {"codes": gather_objects(done.code), "said": gather_objects(done.err)}


@scenario
def checkpoints_of_each_host() -> dict[str, Any]:
    """Rank 0 alone has written; rank 1 has none, a copy, and one of an older run of the same name."""
    folder = shared_folder()
    with _in_a_folder_of_its_own(folder), mock.patch.object(shared_folder_, "PATIENCE", 0.2):
        fit = ["fit", "--config", str(_recipe(folder, run__root="runs")), "--resume", "auto", "--trainer.max_steps"]
        ended = [command(*fit, "2"), command(*fit, "3")]
        if rank():
            shutil.copytree(folder / "host-0" / "runs", "runs")
        dist.barrier()
        ended.append(command(*fit, "3"))
        dist.barrier()
        if rank():
            shutil.rmtree("runs")
            shutil.copytree(folder / "host-0" / "runs", "runs")
            (newest,) = Path("runs").rglob("step-00000003.ckpt")
            torch.save({**torch.load(newest, weights_only=False), "epoch": 1}, newest)
        dist.barrier()
        ended.append(command(*fit, "4"))
    return {"codes": gather_objects([done.code for done in ended]), "said": [done.err for done in ended]}


@contextlib.contextmanager
def _in_a_folder_of_its_own(folder: Path) -> Iterator[None]:
    own, before = folder / f"host-{rank()}", os.getcwd()
    own.mkdir()
    os.chdir(own)
    try:
        yield
    finally:
        os.chdir(before)


@scenario
def shards_for_a_folder_of_each_host() -> dict[str, Any]:
    folder = shared_folder()
    with _in_a_folder_of_its_own(folder):
        return _said(folder, trainer__strategy="fsdp2", run__root="runs")


@scenario
def rewinds_in_a_folder_of_each_host() -> dict[str, Any]:
    folder = shared_folder()
    with _in_a_folder_of_its_own(folder):
        return _said(folder, "--stability.recovery", "{}", run__root="runs")


@scenario
def one_file_for_a_folder_of_each_host() -> dict[str, Any]:
    folder = shared_folder()
    with _in_a_folder_of_its_own(folder):
        return _said(folder, run__root="runs")


def _saved(callback: Any, **options: Any) -> dict[str, Any]:
    said = ""
    steps = Steps()
    with _in_a_folder_of_its_own(shared_folder()), mock.patch.object(shared_folder_, "PATIENCE", 0.2):
        try:
            fit2("fsdp2", steps=2, callbacks=(callback, steps), **options)
        except MisconfigurationException as error:
            said = str(error)
        left = sorted(path.name for path in Path().rglob("*.ckpt*"))
    return {"said": gather_objects(said), "left": gather_objects(left), "steps": steps.begun}


class Steps(Callback):
    begun = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.begun += 1


class _Relative(ModelCheckpoint):
    """Saves below where each rank is, as a path that all share can lie on a disk of each host."""

    def setup(self, *args: Any, **options: Any) -> None:
        super().setup(*args, **options)
        self.dirpath = "kept"


@scenario
def a_project_whose_checkpoints_are_apart() -> dict[str, Any]:
    return _saved(_Relative())


@scenario
def a_project_whose_meshes_differ() -> dict[str, Any]:
    return _saved(Callback(), mesh=MeshOptions(reshard_after_forward=rank() == 0))


@scenario
def a_folder_that_one_rank_may_not_look_into() -> list[str | None]:
    folder = shared_folder()
    if rank():  # as on a host on which the user is another
        refused = PermissionError(13, "Permission denied")
        with mock.patch.object(Path, "exists", side_effect=refused), mock.patch.object(shared_folder_, "PATIENCE", 0.2):
            return gather_objects(shared_folder_.who_does_not_see(folder))
    return gather_objects(shared_folder_.who_does_not_see(folder))


@scenario
def a_save_whose_shards_are_apart() -> dict[str, Any]:
    return _saved(SaveEveryMicroBatch(Path("kept"), only=(4,)))


@scenario
def a_save_in_the_background_whose_shards_are_apart() -> dict[str, Any]:
    return _saved(SaveEveryMicroBatch(Path("kept"), only=(4,)), in_background=True)


if __name__ == "__main__":
    main()
