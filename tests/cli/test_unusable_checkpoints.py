"""A checkpoint that cannot be read, gone on from or written: one sentence, exit code 1, and no traceback."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_disk import files_of_at_most
from tiny_recipe import Done, command, write_recipe

STRATEGIES = {"file": "auto", "folder": "fsdp2"}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two short runs, which saved into a file and into a folder; tests leave them as they are."""
    folder = tmp_path_factory.mktemp("fitted")
    recipe = write_recipe(folder)
    found = {}
    for kind, strategy in STRATEGIES.items():
        words = ["--run.name", kind, "--trainer.strategy", strategy, "--trainer.max_steps", "2"]
        assert command("fit", "--config", recipe, *words).code == 0
        found[kind] = folder / "runs" / kind / "0001" / "checkpoints" / "step-00000002.ckpt"
    assert found["folder"].is_dir()
    return SimpleNamespace(recipe=recipe, root=folder / "runs", **found)


def resume(fitted: SimpleNamespace, path: Path, strategy: str = "auto", *words: str) -> Done:
    options = ["--trainer.strategy", strategy, "--run.name", "resumed", *words]
    return command("fit", "--config", fitted.recipe, "--ckpt_path", path, *options)


def failed_with(done: Done, *parts: str) -> None:
    """It ended with 1 and a single line that has these parts."""
    assert done.code == 1, done.err
    (line,) = done.err.splitlines()
    assert line.startswith("lit-stable fit: ")
    for part in parts:
        assert part in line


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")


def without_optimizer(path: Path) -> None:
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    torch.save(checkpoint, path)


def with_an_object(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "extra": Path("x")}, path)


NO_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half": (half, "is no complete checkpoint file ("),
    "empty": (lambda path: path.write_bytes(b""), "is no complete checkpoint file ("),
    "text": (lambda path: path.write_text("step: 3\n"), "is no complete checkpoint file ("),
    "zip": (other_zip, "is no checkpoint: a zip file, and not one of torch"),
    "list": (
        lambda path: torch.save([1, 2], path),
        "is no Lightning checkpoint but a list; give one that a Trainer has",
    ),
    "weights": (without_optimizer, "holds weights and no optimizer state"),
    "object": (with_an_object, "holds more than plain data, which torch does not load unasked (pathlib.PosixPath); if"),
}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [*((kind, "auto") for kind in NO_CHECKPOINTS), *((kind, "fsdp2") for kind in ("list", "weights", "object"))],
)
def test_a_file_that_is_no_whole_checkpoint(kind: str, strategy: str, fitted: SimpleNamespace, tmp_path: Path) -> None:
    make, told = NO_CHECKPOINTS[kind]
    path = Path(shutil.copy(fitted.file, tmp_path / "other.ckpt"))
    make(path)
    failed_with(resume(fitted, path, strategy), str(path), told)


def test_a_folder_that_is_no_checkpoint(fitted: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "empty.ckpt").mkdir()
    failed_with(resume(fitted, tmp_path / "empty.ckpt", "fsdp2"), "empty.ckpt is no checkpoint: it holds no .metadata")


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--model.gpt.d_model", "32"),
            ".weight has shape (257, 16) in it and (257, 32) in the model (and ",
        ),
        (("--model.gpt.n_layer", "2"), "the model has gpt.blocks.1."),
    ],
    ids=["wider", "deeper"],
)
def test_a_model_of_another_shape(words: tuple[str, ...], told: str, kind: str, fitted: SimpleNamespace) -> None:
    path = getattr(fitted, kind)
    failed_with(resume(fitted, path, STRATEGIES[kind], *words), f"{path}: is of another model: ", told)


def test_a_model_that_has_lost_a_layer_is_not_filled_with_the_rest(fitted: SimpleNamespace, tmp_path: Path) -> None:
    deeper = write_recipe(tmp_path, model__gpt__n_layer=2)
    words = ["--trainer.strategy", "fsdp2", "--trainer.max_steps", "2"]
    assert command("fit", "--config", deeper, *words).code == 0
    path = tmp_path / "runs" / "tiny" / "0001" / "checkpoints" / "step-00000002.ckpt"
    failed_with(resume(fitted, path, "fsdp2"), "it has gpt.blocks.1.", "which the model lacks")


@pytest.mark.parametrize("damage", ["half", "bit"])
def test_resume_auto_names_the_newest_whole_one_and_stops(damage: str, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    words = ["--config", recipe, "--checkpoints.keep_last", "5"]
    assert command("fit", *words, "--trainer.max_steps", "4").code == 0
    checkpoints = tmp_path / "runs" / "tiny" / "0001" / "checkpoints"
    newest = checkpoints / "step-00000004.ckpt"
    if damage == "half":
        half(newest)
    else:
        _flip_a_weight(newest)
    before = sorted(checkpoints.iterdir())
    done = command("fit", *words, "--resume", "auto")
    failed_with(done, str(newest), f"; resume from {checkpoints / 'step-00000003.ckpt'}.")
    assert sorted(checkpoints.iterdir()) == before
    assert not list((tmp_path / "runs" / "tiny").glob("0002"))


@pytest.mark.parametrize("words", [("average",), ("generate", "--ids", "[1]"), ("export", "--to", "hf"), ("validate",)])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_flipped_bit_is_refused_whoever_reads_the_weights(
    words: tuple[str, ...], kind: str, fitted: SimpleNamespace, tmp_path: Path
) -> None:
    whole, path, out = getattr(fitted, kind), tmp_path / "flipped.ckpt", tmp_path / "out"
    if kind == "file":
        shutil.copy(whole, path)
        _flip_a_weight(path)
        damaged = f"{path} is damaged: its record "
    else:
        shutil.copytree(whole, path)
        shard = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        damaged = f"{shard} is damaged: "
    name, *options = words
    given = ["--config", fitted.recipe, "--trainer.strategy", STRATEGIES[kind], "--ckpt_path"]
    given = given if name == "validate" else [whole] * (name == "average")
    done = command(name, *given, path, *options, *(["--out", out] if name in ("average", "export") else []))
    assert done.code == 1, done.err
    (line,) = done.err.splitlines()
    assert line.startswith(f"lit-stable {name}: {damaged}")
    assert line.endswith(f"does not match its checksum; no other usable checkpoint lies in {tmp_path}.")
    assert not out.exists()


def _flip_a_weight(path: Path) -> None:
    largest = max(zipfile.ZipFile(path).infolist(), key=lambda record: record.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + largest.file_size] ^= 1  # within it: names before it are shorter than it is
    path.write_bytes(content)


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_a_save_that_finds_no_room(strategy: str, fitted: SimpleNamespace) -> None:
    name = f"full-{strategy}"
    with files_of_at_most(40_000):
        done = command("fit", "--config", fitted.recipe, "--trainer.strategy", strategy, "--run.name", name)
    told = "step-00000002.ckpt: could not be written (File too large; "
    failed_with(done, told, " GiB are free there); what was saved before it is whole: make room and go on from that.")
    assert list((fitted.root / name / "0001" / "checkpoints").iterdir()) == []
