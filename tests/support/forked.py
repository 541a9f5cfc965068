"""Processes that begin with everything imported: forks of one clean process, which save each of them seven seconds.

Ranks are what ``torchrun`` starts as far as a script can see: each a process of its own with the variables of its rank.
Never forks of a process that runs tests: threads do not come along, and who waits for them, as a process group does
that is collected, waits for ever. For work on a CPU: a process that has seen CUDA cannot be forked.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import installed_once  # noqa: F401 - before Lightning
import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "forked",
        "lit_stable.cli.lightning_cli",
        "lit_stable.devices.check_devices",
        "lit_stable.diagnosis.checkpoint_page",
        "lit_stable.diagnosis.log_page",
        "lit_stable.replay.page",
        "lit_stable.vlm.captioning",
        "lit_stable.weights.average",
        "lit_stable.weights.exchange",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "hypothesis",
        "bitsandbytes",
    ]
)


def start_process(target: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """Call a function of a module in a process of its own, with the environment and in the folder of this one."""
    _start_server(os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = CONTEXT.Process(target=_call, args=(dict(os.environ), os.getcwd(), target, args))
    process.start()
    Finalize(None, _kill, args=(process,), exitpriority=1)  # or the interpreter waits at its end for one that was left
    return process


def _call(environ: dict[str, str], folder: str, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _begin()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    target(*args)


def _begin() -> None:
    """As a process that nobody forked, but for its imports."""
    gc.freeze()  # they are no garbage: no collection walks them, which would also copy every page of them
    # It would start processes as it was started, each loader's worker behind a server of its own with all imports.
    multiprocessing.set_start_method(None, force=True)


def _become(script: str, words: Sequence[str], environ: dict[str, str], folder: str, output: str) -> None:
    """Be ``python SCRIPT WORDS`` with this environment, in this folder, printing to this file."""
    os.setsid()
    _begin()
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    # Read from the environment at import.
    rank_zero_only.rank = fabric_rank_zero_only.rank = int(environ.get("RANK", "0"))
    sys.argv = [script, *words]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


class Script:
    """``python SCRIPT WORDS`` under way in a folder, on one rank."""

    def __init__(self, script: Path, words: Sequence[str], environ: dict[str, str], folder: Path) -> None:
        self.output = folder / f"{script.stem}.log"
        self._process = _script(script, words, environ, folder, self.output)

    def said(self, timeout: float = 600, code: int = 0) -> str:
        """What it printed, when it is through; one that ends otherwise, or takes too long, fails the test."""
        self._process.join(timeout)
        ended = self._process.exitcode
        self.kill()
        text = self.output.read_text(errors="replace")
        assert ended == code, f"ended with {ended}:\n{text[-4000:]}"
        return text

    def kill(self) -> None:
        """With what it started, which is its session."""
        _kill_session(self._process)


def run_ranks(
    processes: int,
    script: Path,
    words: Sequence[str],
    environ: dict[str, str],
    folder: Path,
    timeout: float,
    hosts: int = 1,
) -> str:
    """Run a script on several ranks; how they ended, in words. When one fails, or time is up, all are killed.

    Their variables are those of ranks on so many hosts.
    """
    assert processes % hosts == 0, f"{processes} ranks on {hosts} hosts"
    local = processes // hosts
    common = {
        **environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "none",  # by which Lightning knows that ranks are there already
    }
    ranks = []
    for rank in range(processes):
        own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % local), "GROUP_RANK": str(rank // local)}
        ranks.append(_script(script, words, own, folder, folder / "launch.log"))
    try:
        return _watch(ranks, timeout)
    finally:
        for process in ranks:
            _kill_session(process)


def _script(
    script: Path, words: Sequence[str], environ: dict[str, str], folder: Path, output: Path
) -> ForkServerProcess:
    _start_server(environ["PYTHONPATH"])
    arguments = (str(script), list(words), environ, str(folder), str(output))
    process = CONTEXT.Process(target=_become, args=arguments)
    process.start()
    return process


def _start_server(path: str) -> None:
    """Before the first fork, with the path that this process has: what the server cannot import it leaves out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()


def _watch(ranks: list[ForkServerProcess], timeout: float) -> str:
    end = time.monotonic() + timeout
    running = list(ranks)
    while running:
        if not wait([process.sentinel for process in running], timeout=max(0.0, end - time.monotonic())):
            return f"were ended after {timeout:.0f} s"
        for process in running:
            process.join(0)
        failed = [f"rank {rank} with {process.exitcode}" for rank, process in enumerate(ranks) if process.exitcode]
        if failed:
            return f"ended: {', '.join(failed)}"
        running = [process for process in running if process.exitcode is None]
    return "ended with 0"


def _kill(process: ForkServerProcess) -> None:
    process.kill()
    process.join()


def _kill_session(process: ForkServerProcess) -> None:
    """A process and what it started."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill(process)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
