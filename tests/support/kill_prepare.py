"""Kill `prepare` at moments at which the disk changes, and go on: ``python kill_prepare.py INPUT FOLDER STRIDE``.

Run as a program of its own: each attempt is a fork of this process, which therefore has no threads. Prints the number
of moments. A stride of 1 tries all of them.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import signal
import sys
from pathlib import Path

from lit_stable.data import prepare as preparing
from lit_stable.data.text import inputs, tokenising

OPTIONS = {"validation_fraction": 0.3, "keep": "score", "filter": "top 0.9 by score", "order": "date"}


def attempt(source: Path, out: Path, kill_at: int | None) -> tuple[int, int]:
    """Prepare in a fork that kills itself before its n-th change of the disk; the wait status, and changes counted."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        count = [0]

        def watched(function):
            def call(*arguments, **options):
                count[0] += 1
                os.write(write, b".")
                if count[0] == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for owner, name in ((Path, "rename"), (Path, "mkdir"), (Path, "unlink"), (os, "fsync"), (shutil, "rmtree")):
            setattr(owner, name, watched(getattr(owner, name)))
        Path.touch = watched(Path.touch)
        preparing.prepare([source], out, "bytes", **OPTIONS, report=lambda line: None)
        os._exit(0)
    os.close(write)
    changes = 0
    while block := os.read(read, 65_536):
        changes += len(block)
    os.close(read)
    return os.waitpid(child, 0)[1], changes


def differences(first: Path, second: Path) -> list[str]:
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    others = sorted(str(path.relative_to(second)) for path in second.rglob("*") if path.is_file())
    if names != others:
        return [f"{names} != {others}"]
    return [name for name in names if not filecmp.cmp(first / name, second / name, shallow=False)]


def main(source: Path, folder: Path, stride: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inputs.plan_pieces.__defaults__ = (4000,)
    tokenising.PieceWorker.__init__.__defaults__ = (2000,)
    folder.mkdir(exist_ok=True)
    reference = folder / "whole" / "out"
    status, moments = attempt(source, reference, None)
    assert status == 0
    for kill_at in range(1, moments + 1, stride):
        out = folder / f"kill-{kill_at}" / "out"
        status, _ = attempt(source, out, kill_at)
        assert os.WIFSIGNALED(status), (kill_at, status)
        status, _ = attempt(source, out, None)
        assert status == 0, (kill_at, status)
        assert differences(reference, out) == [], (kill_at, differences(reference, out))
        assert [path.name for path in out.parent.iterdir()] == ["out"], kill_at
        shutil.rmtree(out.parent)
    print(moments)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
