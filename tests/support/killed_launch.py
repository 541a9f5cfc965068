"""``torchrun`` over the command line, one rank of which is killed. By hand on a CPU: ``killed_launch.py FOLDER 4``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tiny_recipe import REPOSITORY, write_recipe

LAST_STEP = 12


@dataclass
class Ended:
    """How a launch ended: its code, the seconds from the kill to its end, what it printed, and who outlived it."""

    code: int
    seconds: float
    said: str
    left: list[int]


def kill_one_rank(folder: Path, processes: int, accelerator: str, restarts: int, victim: int) -> Ended:
    """Kill rank ``victim`` once step 5 is through; with ``restarts`` the launcher starts all ranks anew."""
    recipe = write_recipe(
        folder,
        trainer__devices=processes,
        trainer__accelerator=accelerator,
        trainer__strategy="fsdp2",
        trainer__max_steps=LAST_STEP if restarts else 100_000,
        data__global_batch=2 * processes,
        checkpoints__every_steps=2,
    )
    log = folder / f"launch-{restarts}.log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = ["-m", "lit_stable", "fit", "--config", str(recipe), "--resume", "auto", "--run.name", f"killed-{restarts}"]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("w") as file:
        command = [*torchrun, f"--max-restarts={restarts}", *words]
        launch = subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
    try:
        _wait_for_line(log, "step 5/", launch)
        ranks = _ranks(launch.pid)
        os.kill(ranks[victim], signal.SIGKILL)
        since = time.monotonic()
        code = launch.wait(300)
        seconds = time.monotonic() - since
        return Ended(code, seconds, log.read_text(), [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()])
    finally:
        if launch.poll() is None:
            os.killpg(launch.pid, signal.SIGKILL)
            launch.wait()


def _wait_for_line(log: Path, beginning: str, launch: subprocess.Popen[bytes]) -> None:
    while not any(line.startswith(beginning) for line in log.read_text().splitlines()):
        assert launch.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)


def _ranks(launcher: int) -> dict[int, int]:
    """Process ids of the launcher's children, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for child in children:
        for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                found[int(variable[5:])] = int(child)
    return found


def assert_all_are_gone(ended: Ended, victim: int) -> None:
    assert ended.code == 1
    assert ended.seconds < 60
    assert not ended.left
    error = ended.said[ended.said.rindex("Root Cause") :]
    assert f"rank      : {victim} " in error
    assert "Signal 9 (SIGKILL)" in error


def assert_it_went_on(ended: Ended) -> None:
    assert ended.code == 0, ended.said[-3000:]
    assert "going on with" in ended.said
    assert f"step {LAST_STEP}/{LAST_STEP}" in ended.said


if __name__ == "__main__":
    place, number = Path(sys.argv[1]), int(sys.argv[2])
    dead = kill_one_rank(place, number, "cpu", restarts=0, victim=number - 2)
    print(f"all gone {dead.seconds:.1f} s after the kill, code {dead.code}\n{dead.said[-700:]}")
    assert_all_are_gone(dead, number - 2)
    again = kill_one_rank(place, number, "cpu", restarts=1, victim=number - 2)
    print(f"ended {again.seconds:.1f} s after the kill, code {again.code}")
    assert_it_went_on(again)
