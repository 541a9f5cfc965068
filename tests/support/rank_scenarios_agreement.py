"""Two ranks that were started as differently as two hosts can be; run as ``rank_scenarios.py`` is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.pytorch.callbacks import ModelCheckpoint
from rank_scenarios import fit2, main, rank, scenario, shared_folder
from tiny_gpt_run import SaveEveryMicroBatch
from tiny_recipe import command, write_recipe

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.rank_gather import gather_objects
from lit_stable.data.prepare import prepare
from lit_stable.run import session


def _recipe(folder: Path, **changes: Any) -> Path:
    """A recipe of this rank, its data too."""
    own = folder / f"node-{rank()}"
    own.mkdir()
    strategy = {"trainer__strategy": "ddp", "run__root": str(folder / "runs")}
    return write_recipe(own, **{**strategy, **changes})


def _said(folder: Path, *words: Any, **changes: Any) -> dict[str, Any]:
    """What ``fit`` came to on both ranks, and the run folders that are left."""
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
def code_that_differs() -> dict[str, Any]:
    found = {"torch": "2", "OS": f"Linux {rank()}"}
    versions = mock.patch.object(session, "versions", return_value=found)
    code = mock.patch.object(session, "code_digest", return_value=f"abc{rank()}")
    with versions, code:
        return _said(shared_folder())


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


def _saved(callback: Any, **options: Any) -> list[str]:
    said = ""
    with _in_a_folder_of_its_own(shared_folder()):
        try:
            fit2("fsdp2", steps=2, callbacks=(callback,), **options)
        except MisconfigurationException as error:
            said = str(error)
    return gather_objects(said)  # type: ignore[no-any-return]


class _Relative(ModelCheckpoint):
    """Saves below where each rank is, as a path that all share can lie on a disk of each host."""

    def setup(self, *args: Any, **options: Any) -> None:
        super().setup(*args, **options)
        self.dirpath = "kept"


@scenario
def a_project_whose_checkpoints_are_apart() -> list[str]:
    return _saved(_Relative())


@scenario
def a_save_whose_shards_are_apart() -> list[str]:
    return _saved(SaveEveryMicroBatch(Path("kept"), only=(4,)))


@scenario
def a_save_in_the_background_whose_shards_are_apart() -> list[str]:
    return _saved(SaveEveryMicroBatch(Path("kept"), only=(4,)), in_background=True)


if __name__ == "__main__":
    main()
