"""Start several ranks for a test."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked import run_ranks
from torchrun import Torchrun, hosts_needed

SUPPORT = Path(__file__).parent


def run_scenarios(
    names: list[str],
    folder: Path,
    accelerator: str = "cpu",
    processes: int = 2,
    script: str = "rank_scenarios.py",
    timeout: float = 300,
    hosts: int | None = None,
) -> dict[str, Any]:
    """Run functions of a script of scenarios on several ranks, in one launch; what rank 0 returned, by name.

    The ranks are dealt out over so many ``hosts``, by default over as few as the accelerator allows.
    """
    results = folder / "results.jsonl"
    results.unlink(missing_ok=True)  # of an earlier launch in this folder
    words = [str(results), accelerator, *names]
    environ = {**rank_environ(), "SCENARIO_FOLDER": str(folder)}
    hosts = hosts or hosts_needed(processes, accelerator)
    if accelerator == "cpu":
        ended = run_ranks(processes, SUPPORT / script, words, environ, folder, timeout, hosts)
    else:
        log = folder / "launch.log"
        launch = Torchrun([str(SUPPORT / script), *words], processes, hosts, environ, folder, [log])
        ended = _end(launch, timeout)
    output = f"{processes} ranks {ended}:\n{(folder / 'launch.log').read_text(errors='replace')[-8000:]}"
    if not results.exists():
        pytest.fail(output)
    found: dict[str, Any] = {}
    for line in results.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            found.update(json.loads(line))
    # A rank that died took the launch with it: what it did not reach, or not to the end, fails with what was printed.
    return {name: found.get(name, {"error": output}) for name in names}


def rank_environ() -> dict[str, str]:
    """This environment, with the package and what supports its tests in reach, and one thread for a rank."""
    path = os.pathsep.join([str(SUPPORT.parent.parent), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _end(launch: Torchrun, timeout: float) -> str:
    """How a launch ended, in words; one that takes too long is ended with all its ranks."""
    try:
        return f"ended with {' and '.join(map(str, launch.wait(timeout)))}"
    except subprocess.TimeoutExpired:
        return f"were ended after {timeout:.0f} s"
    finally:
        launch.kill()


def of(*names: str) -> pytest.MarkDecorator:
    """Give a test, as ``result``, what each of these scenarios came to; see the fixture of that name."""
    return pytest.mark.parametrize("result", names, indirect=True)
