"""One process at a time trains in a run folder; whoever asks is told which."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_stable.run import under_way
from lit_stable.run.under_way import LOCK, UnderWay, is_free

HOLD = """
import os, sys, time
from pathlib import Path
from lit_stable.run.under_way import UnderWay
lock = UnderWay()
assert lock.take(Path(sys.argv[1])) is None
if len(sys.argv) > 2 and os.fork() == 0:  # a data worker that outlives it
    time.sleep(20)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(60)
"""

LOOK = """
import fcntl, sys, time
with open(sys.argv[1]) as file:
    fcntl.lockf(file, fcntl.LOCK_SH, 1)
    print("looking", flush=True)
    time.sleep(0.3)
"""

ASK = """
import sys
from pathlib import Path
from lit_stable.run.under_way import UnderWay, is_free
print(is_free(Path(sys.argv[1])), UnderWay().take(Path(sys.argv[1])))
"""


def in_another_process(folder: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(process.pid)
    return process


def test_a_folder_that_another_process_holds_is_refused_until_that_one_is_killed(tmp_path: Path) -> None:
    assert is_free(tmp_path)
    process = in_another_process(tmp_path)
    lock = UnderWay()
    assert f"process {process.pid} on " in (lock.take(tmp_path) or "")
    assert not is_free(tmp_path)
    process.kill()
    process.wait()
    assert is_free(tmp_path)
    assert lock.take(tmp_path) is None
    assert f'"process": {os.getpid()}' in (tmp_path / LOCK).read_text()
    lock.give_back()
    lock.give_back()


def test_a_worker_that_outlives_its_trainer_holds_nothing(tmp_path: Path) -> None:
    process = in_another_process(tmp_path, "with a worker")
    process.kill()
    process.wait()
    lock = UnderWay()
    assert lock.take(tmp_path) is None
    lock.give_back()


def test_it_is_given_back_without_an_end_of_the_process(tmp_path: Path) -> None:
    lock = UnderWay()
    assert lock.take(tmp_path) is None
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", ASK, str(tmp_path)], capture_output=True, text=True, check=True)
        found.append(done.stdout.strip())
        lock.give_back()
    assert found[0].startswith(f"False process {os.getpid()} on ")
    assert found[1] == "True None"


def test_one_who_only_looks_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    command = [sys.executable, "-c", LOOK, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as looks:
        assert looks.stdout is not None
        assert looks.stdout.readline() == "looking\n"
        assert is_free(tmp_path)
        lock = UnderWay()
        assert lock.take(tmp_path) is None
    lock.give_back()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_refuses_nobody_and_says_of_no_folder_that_it_is_free(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(under_way.fcntl, "lockf", cannot)
    lock = UnderWay()
    assert lock.take(tmp_path) is None
    assert not is_free(tmp_path)
    lock.give_back()


def test_without_fcntl_nobody_is_refused_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "fcntl", None)
    lock = UnderWay()
    assert lock.take(tmp_path) is None
    assert not is_free(tmp_path)
    lock.give_back()
