"""A disk that is full, or not for us, in a command: one sentence, exit code 1, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import files_of_at_most
from tiny_recipe import Done, command

from lit_stable.cli.main import run
from lit_stable.data import prepare as prepare_file
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.weights.stored_model import write_weights

SMALL = GPTConfig(vocab_size=257, n_layer=1, n_head=2, d_model=32, max_length=16)
TOO_LARGE = os.strerror(errno.EFBIG)  # what the limit of a process says, as a full disk its own


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "a.ckpt"
    write_weights(path, SMALL, {name: p.detach() for name, p in GPT(SMALL).named_parameters() if name != "head.weight"})
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        text = f"document {number} " * (50 if number < 5 else 500)
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": text}))  # each a piece of its own
    return folder


def could_not_write(done: Done, path: Path) -> None:
    """It ended with 1 and a single line about ``path``."""
    assert done.code == 1, done.err
    (line,) = done.err.splitlines()
    assert f": {path}: could not be written (" in line
    assert line.endswith(": make room, and give the command again.")


@pytest.mark.parametrize(
    "words",
    [
        ["average", "a.ckpt", "a.ckpt", "--out"],
        ["export", "a.ckpt", "--to", "hf", "--family", "gpt2", "--out"],
        ["import", "hf", "--out"],
    ],
    ids=lambda words: words[0],
)
def test_weights_that_do_not_fit(checkpoint: Path, tmp_path: Path, words: list[str]) -> None:
    if words[0] == "import":
        assert command("export", checkpoint, "--to", "hf", "--family", "gpt2", "--out", "hf").code == 0
    before = sorted(tmp_path.iterdir())
    for size in (4096, 100):
        with files_of_at_most(size):
            done = command(*words, "out.ckpt")
        could_not_write(done, Path("out.ckpt"))
        assert TOO_LARGE in done.err
        assert sorted(tmp_path.iterdir()) == before
    assert command(*words, "out.ckpt").code == 0


def test_a_recipe_that_does_not_fit_takes_its_checkpoint_along(checkpoint, tmp_path, monkeypatch) -> None:
    assert command("export", checkpoint, "--to", "hf", "--family", "gpt2", "--out", "hf").code == 0

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("lit_stable.weights.exchange.write_whole", full)
    could_not_write(command("import", "hf", "--out", "out.ckpt"), Path("out.yaml"))
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_prepare_goes_on_where_the_disk_was_full(texts: Path, tmp_path: Path, workers: int) -> None:
    words = ["prepare", texts, "--tokenizer", "bytes", "--validation_fraction", "0", "--workers", str(workers), "--out"]
    assert command(*words, "whole/store").code == 0  # the name is the documents' source
    with files_of_at_most(4096):
        done = command(*words, "store")
    could_not_write(done, Path("store"))
    assert "what is finished is kept in store.unfinished and used" in done.out
    assert not (tmp_path / "store").exists()
    assert not list(tmp_path.rglob("*.writing-*"))  # they take up the room that the disk lacks
    again = command(*words, "store")
    assert again.code == 0, again.err
    assert "going on; 5 of 6 pieces are done" in again.out
    files = [path.relative_to("whole") for path in Path("whole").rglob("*") if path.is_file()]
    assert all(file.read_bytes() == (Path("whole") / file).read_bytes() for file in files)


def test_stores_that_do_not_fit_leave_the_parts_that_took_time(texts: Path, tmp_path: Path) -> None:
    words = ["prepare", texts, "--tokenizer", "bytes", "--validation_fraction", "0", "--out", "store"]
    with files_of_at_most(12000):  # the parts fit, of which the store is the sum
        done = command(*words)
    could_not_write(done, Path("store"))
    assert not (tmp_path / "store").exists()
    assert command(*words).code == 0


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "could not be written (No space left on device; "),
        (errno.EDQUOT, "could not be written (Disk quota exceeded; "),
        (errno.EROFS, "could not be written (Read-only file system); nothing unfinished has that name: name another"),
        (errno.EACCES, "may not be used (Permission denied); get the right to read and write there, or name another"),
        (errno.EPERM, "may not be used (Operation not permitted); get the right to read and write there, or name"),
        (errno.ENAMETOOLONG, "cannot be used (File name too long); name another, or mend that."),
    ],
)
def test_each_reason_has_its_remedy(texts: Path, number: int, sentence: str, monkeypatch, capsys) -> None:
    def refused(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "store.unfinished")

    monkeypatch.setattr(prepare_file, "Preparation", refused)
    assert run(["prepare", str(texts), "--tokenizer", "bytes", "--out", "store"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    name = "store.unfinished" if number == errno.ENAMETOOLONG else "store"
    assert line.startswith(f"lit-stable prepare: {name}: {sentence}")


def test_an_error_that_is_no_matter_of_the_disk_keeps_its_traceback(texts: Path, monkeypatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(prepare_file, "Preparation", broken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        run(["prepare", str(texts), "--tokenizer", "bytes", "--out", "store"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["recipes"], ["--help"], ["inspect", "a.ckpt", "--lines", "0"]])
def test_output_that_cannot_be_written(checkpoint: Path, words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        argv = [sys.executable, "-m", "lit_stable", *words]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == (
        "lit-stable: the output could not be written (No space left on device); make room, or send it elsewhere."
    )
