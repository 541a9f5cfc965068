"""Measure tokens per second per device on 1, 2, 4, ... devices of one machine: weak scaling. A script; it is no test.

Every device trains its own micro-batches, so that the work of each stays the same. Each number of devices and each
strategy is a launch of its own of the real trainer, with everything that a run has by default; launches take turns,
round after round. A step is `--window` micro-batches of each device.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from turns import Stopwatch, build, device_name, set_up

RECIPES = {"124m": "gpt2_124m", "1b3": "gpt_1b3"}


def measure(arguments: argparse.Namespace, extra: list[str]) -> None:
    """As one rank of a launch: train, and let rank 0 write what was measured."""
    ranks = int(os.environ["WORLD_SIZE"])
    set_up()
    options: dict[str, Any] = dict(pair.split("=", 1) for pair in extra)
    layout = int(options.get("mesh.tensor_parallel", 1))
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
        sizes = {"trainer.devices": ranks, "trainer.strategy": arguments.strategies[0], "data.num_workers": 2}
        probe = build([RECIPES.get(arguments.size, arguments.size)], root, **{**sizes, **options})
        per_rank = probe.datamodule.micro_batch * arguments.window
        sizes["data.global_batch"] = per_rank * (ranks // layout)
        cli = build([RECIPES.get(arguments.size, arguments.size)], root, **{**options, **sizes})
        stopwatch = Stopwatch(arguments.uncounted, arguments.steps)
        cli.trainer.callbacks.append(stopwatch)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        if cli.trainer.is_global_zero:
            tokens = sizes["data.global_batch"] * cli.datamodule.sequence_length
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            found = {"rate": tokens / stopwatch.seconds / ranks, "peak": peak, "loss": float(cli.model.window_loss)}
            Path(arguments.result).write_text(json.dumps(found))


def launch(ranks: int, strategy: str, arguments: argparse.Namespace, extra: list[str]) -> dict[str, float] | None:
    """One launch; ``None`` if it failed, with the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(__file__, "--result", str(result), "--size", arguments.size, "--strategies", strategy),
            *("--steps", str(arguments.steps), "--uncounted", str(arguments.uncounted)),
            *("--window", str(arguments.window), *extra),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not result.exists():
            print(f"{strategy} on {ranks}: failed\n{(done.stdout + done.stderr)[-3000:]}", flush=True)
            return None
        found: dict[str, float] = json.loads(result.read_text())
        print(f"{strategy} on {ranks}: {found['rate']:,.0f} tokens/s each", flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b3", help="124m, 1b3, or the name of a recipe")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=["fsdp2", "fsdp"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a launch")
    parser.add_argument("--uncounted", type=int, default=4, help="steps before those")
    parser.add_argument("--window", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments, extra = parser.parse_known_args()  # the rest: KEY=VALUE of the recipe
    if arguments.result:
        measure(arguments, extra)
        return
    cases = list(itertools.product(arguments.strategies, arguments.devices))
    runs: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(arguments.rounds):
        for strategy, ranks in cases[:: -1 if number % 2 else 1]:
            found = launch(ranks, strategy, arguments, extra)
            runs[strategy, ranks] += [found] if found else []
    print(
        f"{time.strftime('%Y-%m-%d')}, {device_name()}, torch {torch.__version__}, {arguments.size} {' '.join(extra)}"
    )
    first = cases[0]  # a strategy that does not train on one device is compared with the first one there
    print("| strategy | devices | tokens/s per device, median | range | of the first row | peak memory, GiB |")
    print("|---|--:|--:|--:|--:|--:|")
    for (strategy, ranks), found_runs in runs.items():
        if not found_runs:
            continue
        rates = [run["rate"] for run in found_runs]
        alone = [run["rate"] for run in runs[first]]
        share = f"{statistics.median(rates) / statistics.median(alone):.3f}" if alone else "-"
        peak = max(run["peak"] for run in found_runs) / 2**30
        print(
            f"| {strategy} | {ranks} | {statistics.median(rates):,.0f} | {min(rates):,.0f}-{max(rates):,.0f} | {share}"
            f" | {peak:.1f} |"
        )


if __name__ == "__main__":
    main()
