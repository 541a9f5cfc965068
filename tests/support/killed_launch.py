"""``torchrun`` over the command line, one rank of which is killed.

By hand on a CPU, with four ranks on one host or on two: ``killed_launch.py FOLDER 4 [2]``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch import rank_environ
from tiny_recipe import write_recipe
from torchrun import Torchrun, hosts_needed

LAST_STEP = 12
PATIENCE = 60.0  # seconds from the kill


@dataclass
class Ended:
    """How a launch ended, for each host: its agent's code, seconds from the kill to its end, and what it printed."""

    codes: list[int | None]
    """None: it never ended."""
    seconds: list[float]
    said: list[str]
    host: int
    """That of the rank that was killed."""
    left: list[int]
    """Ranks of the first start that are still there a minute after the kill, themselves or what they started."""


def kill_one_rank(
    folder: Path, processes: int, accelerator: str, restarts: int, victim: int, hosts: int | None = None
) -> Ended:
    """Kill rank ``victim`` once step 5 is through; with ``restarts`` the launcher starts all ranks anew.

    The ranks are dealt out over so many ``hosts``, by default over as few as the accelerator allows.
    """
    recipe = write_recipe(
        folder,
        trainer__devices=processes,
        trainer__accelerator=accelerator,
        trainer__strategy="fsdp2",
        trainer__max_steps=LAST_STEP if restarts else 100_000,
        data__global_batch=2 * processes,
        checkpoints__every_steps=2,
    )
    words = ["-m", "lit_stable", "fit", "--config", str(recipe), "--resume", "auto", "--run.name", f"killed-{restarts}"]
    environ = {**rank_environ(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    hosts = hosts or hosts_needed(processes, accelerator)
    logs = [folder / f"launch-{restarts}-host-{host}.log" for host in range(hosts)]
    launch = Torchrun(words, processes, hosts, environ, folder, logs, restarts)
    try:
        _wait_for_line(logs, "step 5/", launch)
        ranks = launch.ranks()
        (host,) = (host for host, own in enumerate(ranks) if victim in own)
        os.kill(ranks[host][victim], signal.SIGKILL)
        since = time.monotonic()
        seconds = _ends(launch, 300)
        left = [pid for own in ranks for pid in own.values() if _is_there(pid)]
        while left and time.monotonic() - since < PATIENCE:  # what compiles for a rank ends a little after it
            time.sleep(0.5)
            left = [pid for pid in left if _is_there(pid)]
        return Ended([agent.poll() for agent in launch.agents], seconds, [log.read_text() for log in logs], host, left)
    finally:
        launch.kill()


def _wait_for_line(logs: list[Path], beginning: str, launch: Torchrun) -> None:
    while not any(line.startswith(beginning) for log in logs for line in log.read_text().splitlines()):
        assert all(agent.poll() is None for agent in launch.agents), [log.read_text()[-3000:] for log in logs]
        time.sleep(0.1)


def _ends(launch: Torchrun, timeout: float) -> list[float]:
    """Seconds from now until each agent has ended; infinite for one that has not by then."""
    since = time.monotonic()
    seconds = [float("inf")] * len(launch.agents)
    while float("inf") in seconds and time.monotonic() - since < timeout:
        for host, agent in enumerate(launch.agents):
            if seconds[host] == float("inf") and agent.poll() is not None:
                seconds[host] = time.monotonic() - since
        time.sleep(0.1)
    return seconds


def _is_there(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def assert_all_are_gone(ended: Ended, victim: int) -> None:
    """Of the hosts without the rank that was killed it is only asked that they end, and not as if all were well."""
    assert ended.codes[ended.host] == 1
    assert None not in ended.codes, ended.said
    assert all(ended.codes)
    assert max(ended.seconds) < PATIENCE
    assert not ended.left
    said = ended.said[ended.host]
    error = said[said.rindex("Root Cause") :]
    assert f"rank      : {victim} " in error
    assert "Signal 9 (SIGKILL)" in error


def assert_it_went_on(ended: Ended) -> None:
    assert ended.codes == [0] * len(ended.codes), [said[-3000:] for said in ended.said]
    assert not ended.left
    said = "".join(ended.said)
    assert "going on with" in said
    assert f"step {LAST_STEP}/{LAST_STEP}" in said


def _print(ended: Ended) -> None:
    for host, (code, seconds) in enumerate(zip(ended.codes, ended.seconds, strict=True)):
        killed = ", where the rank was killed" if host == ended.host else ""
        print(f"host {host}{killed}: code {code} {seconds:.1f} s after the kill\n{ended.said[host][-700:]}\n")


if __name__ == "__main__":
    place, number, several = Path(sys.argv[1]), int(sys.argv[2]), int([*sys.argv, "1"][3])
    dead = kill_one_rank(place, number, "cpu", restarts=0, victim=number - 2, hosts=several)
    _print(dead)
    assert_all_are_gone(dead, number - 2)
    again = kill_one_rank(place, number, "cpu", restarts=1, victim=number - 2, hosts=several)
    _print(again)
    assert_it_went_on(again)
