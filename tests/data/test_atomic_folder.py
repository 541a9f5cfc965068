from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from lit_stable.data.atomic_folder import new_folder


def test_the_name_appears_when_all_is_written(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_exception_leaves_nothing(tmp_path):
    def write():
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out: exists already"), new_folder(tmp_path / "out"):
        pass


def test_the_first_of_two_writers_wins(tmp_path):
    def write_while_another_does():
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("mine")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "file").write_text("theirs")

    with pytest.raises(FileExistsError, match="another process wrote it first"):
        write_while_another_does()
    assert (tmp_path / "out" / "file").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_writer_leaves_no_folder_and_the_next_one_cleans_up(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from lit_stable.data.atomic_folder import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'file').write_text('x'); os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], env=environment, check=False)
    assert result.returncode == -9
    (abandoned,) = tmp_path.iterdir()
    assert abandoned.name.startswith("out.partial-")
    with new_folder(tmp_path / "out"):
        assert not abandoned.exists()


def test_a_running_writer_is_left_alone(tmp_path):
    other = tmp_path / f"out.partial-{socket.gethostname()}-{os.getppid()}"
    other.mkdir()
    with new_folder(tmp_path / "out"):
        assert other.exists()
