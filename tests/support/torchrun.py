"""``torchrun`` on this machine: one agent, or one for each of several hosts that are all this machine.

NCCL takes no two ranks of one host on one card. It knows a host by a name that can be given, so two cards carry four
ranks as two hosts, which send to each other over the loopback.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from forked import free_port


def hosts_needed(processes: int, accelerator: str) -> int:
    """How many hosts it takes that no host has two ranks on one card; on a CPU one."""
    return 1 if accelerator == "cpu" else math.ceil(processes / torch.cuda.device_count())


class Torchrun:
    """``torchrun WORDS`` under way on every host, in a folder; ``logs`` has a file for each, or one for all."""

    def __init__(
        self,
        words: Sequence[str],
        processes: int,
        hosts: int,
        environ: dict[str, str],
        folder: Path,
        logs: Sequence[Path],
        restarts: int = 0,
    ) -> None:
        assert processes % hosts == 0, f"{processes} ranks on {hosts} hosts"
        program = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes // hosts}"]
        endpoint = f"127.0.0.1:{free_port()}"
        for log in logs:
            log.write_bytes(b"")
        self.agents = []
        for host in range(hosts):
            meet = _meeting(host, hosts, endpoint) if hosts > 1 else ["--standalone"]
            own = {**environ, **_names(host)} if hosts > 1 else environ
            command = [*program, *meet, f"--max-restarts={restarts}", *words]
            with logs[host % len(logs)].open("ab") as log:
                agent = subprocess.Popen(command, env=own, cwd=folder, stdout=log, stderr=log, start_new_session=True)
            self.agents.append(agent)

    def wait(self, timeout: float) -> list[int]:
        """The agents' codes; ``TimeoutExpired`` when one is still there after so many seconds."""
        end = time.monotonic() + timeout
        return [agent.wait(max(0.0, end - time.monotonic())) for agent in self.agents]

    def ranks(self) -> list[dict[int, int]]:
        """Process ids by rank, for each host."""
        return [_ranks(agent.pid) if agent.poll() is None else {} for agent in self.agents]

    def kill(self) -> None:
        """Agents that still run, and their ranks: each is a session of its own, which outlives its agent."""
        running = [agent for agent in self.agents if agent.poll() is None]
        for agent in running:
            agent.send_signal(signal.SIGSTOP)  # so that it starts none meanwhile
        for agent in running:
            for pid in [*_children(agent.pid), agent.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            agent.wait()


def _meeting(host: int, hosts: int, endpoint: str) -> list[str]:
    """Options by which agents find each other; the first keeps the store that they meet at."""
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={int(host == 0)}"]
    return [f"--nnodes={hosts}", *where, "--rdzv-id=hosts", "--local-addr=127.0.0.1"]


def _names(host: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"host-{host}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _ranks(agent: int) -> dict[int, int]:
    found = {}
    for child in _children(agent):
        with contextlib.suppress(OSError):  # it has just ended
            for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if variable.startswith(b"RANK="):
                    found[int(variable[5:])] = child
    return found
