from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lit_stable.data.text.unfinished_folder import locked_folder, remove_folder, unfinished_folder

HOLD = """
import sys
from pathlib import Path
from lit_stable.data.text.unfinished_folder import locked_folder
with locked_folder(Path(sys.argv[1]), lambda: None):
    print("held", flush=True)
    sys.stdin.read()
"""


def fail() -> None:
    pytest.fail("there is nobody to wait for")


def test_the_folder_stays_with_what_is_in_it(tmp_path):
    folder = unfinished_folder(tmp_path / "out")
    assert folder == tmp_path / "out.unfinished"
    with locked_folder(folder, fail):
        (folder / "work").touch()
    with locked_folder(folder, fail):
        assert (folder / "work").exists()
    with locked_folder(folder, fail):
        remove_folder(folder)
    assert not folder.exists()


@pytest.mark.parametrize("end", ["kill", "delete"])
def test_one_process_at_a_time_and_a_killed_one_lets_go(tmp_path, end):
    folder = tmp_path / "out.unfinished"
    command = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    waits, entered = threading.Event(), threading.Event()

    def enter() -> None:
        with locked_folder(folder, waits.set):
            entered.set()
            assert (folder / "lock").exists()

    thread = threading.Thread(target=enter)
    thread.start()
    assert waits.wait(60)
    assert not entered.is_set()
    if end == "kill":
        holder.kill()
    else:  # done: the folder is deleted by who holds it, and the one that waits makes it anew
        remove_folder(folder)
        holder.stdin.close()
    holder.wait(60)
    thread.join(60)
    assert entered.is_set()
    holder.stdout.close()
    holder.stdin.close()
