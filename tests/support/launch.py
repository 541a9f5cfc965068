"""Start several ranks for a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_ranks

SUPPORT = Path(__file__).parent


def run_scenarios(
    names: list[str],
    folder: Path,
    accelerator: str = "cpu",
    processes: int = 2,
    script: str = "rank_scenarios.py",
    timeout: float = 300,
) -> dict[str, Any]:
    """Run functions of a script of scenarios on several ranks, in one launch; what rank 0 returned, by name."""
    results = folder / "results.jsonl"
    results.unlink(missing_ok=True)  # of an earlier launch in this folder
    words = [str(results), accelerator, *names]
    path = os.pathsep.join([str(SUPPORT.parent.parent), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SCENARIO_FOLDER": str(folder)}
    if accelerator == "cpu":
        ended = run_ranks(processes, SUPPORT / script, words, environ, folder, timeout)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        ended = _run([*torchrun, str(SUPPORT / script), *words], environ, folder, timeout)
    output = f"{processes} ranks {ended}:\n{(folder / 'launch.log').read_text(errors='replace')[-8000:]}"
    if not results.exists():
        pytest.fail(output)
    found: dict[str, Any] = {}
    for line in results.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            found.update(json.loads(line))
    # A rank that died took the launch with it: what it did not reach, or not to the end, fails with what was printed.
    return {name: found.get(name, {"error": output}) for name in names}


def _run(command: list[str], environ: dict[str, str], folder: Path, timeout: float) -> str:
    """How a launch ended, in words; one that takes too long is ended with all its ranks."""
    with (folder / "launch.log").open("w") as file:
        launch = subprocess.Popen(command, env=environ, cwd=folder, stdout=file, stderr=file, start_new_session=True)
        try:
            return f"ended with {launch.wait(timeout)}"
        except subprocess.TimeoutExpired:
            os.killpg(launch.pid, signal.SIGKILL)
            launch.wait()
            return f"were ended after {timeout:.0f} s"


def of(*names: str) -> pytest.MarkDecorator:
    """Give a test, as ``result``, what each of these scenarios came to; see the fixture of that name."""
    return pytest.mark.parametrize("result", names, indirect=True)
