"""How long before the loss do activations surge, and where first: a run that dies by itself, by several seeds.

    lit-stable fit --config hf_vlm/language && lit-stable fit --config hf_vlm/vision
    python benchmarks/activation_surge.py

Nothing is made to go wrong: the new blocks of `hf_vlm/captions` train without norms of queries and keys, without
clipping, at a rate that rises until it is far too high. Printed for each seed: the step at which the loss is lost, the
step of the first surge that the detector finds, their distance, and by role and layer how much activations have grown
until then. What the same detector finds in a run that lives: `--peak 0.002`, or `-- --model.gated.qk_norm rmsnorm`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import statistics
import tempfile
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch

from lit_stable.cli.main import run

PREFIX = "stability/activation_rms/"
NEW = "sight.blocks"
ROLES = ("q", "k", "v", "o", "fc1", "fc2", "residual")
LOST = 1.0  # nats above the lowest loss so far
FROM = 60  # where surges count from: new blocks begin at nothing and grow in any run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="hf_vlm/captions", help="Recipe whose run dies.")
    parser.add_argument("--peak", type=float, default=0.1, help="Learning rate.")
    parser.add_argument("--warmup", type=int, default=200, help="Steps to that rate; the run dies on the way.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=2, help="Steps between measurements.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--root", default="runs", help="Folder with the runs of both backbones.")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="Behind --: further options of the recipe.")
    given = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    print(f"{date.today()}, {machine}, rate up to {given.peak:g} at step {given.warmup} {' '.join(given.options)}")
    leads = [measure(given, seed) for seed in given.seeds]
    known = [lead for lead in leads if lead is not None]
    print(f"\nlead in steps by seed: {leads}" + (f", median {statistics.median(known)}" if known else ""))


def measure(given: argparse.Namespace, seed: int) -> int | None:
    """One run; steps from the first surge to the loss that is lost, None where one of them is not."""
    name = f"surge-{given.peak:g}-{seed}"
    with tempfile.TemporaryDirectory() as scratch:
        surge = {"factor": 2.0, "window": 20, "warmup": FROM}
        options = {
            **{"run.root": given.root, "run.name": name, "model.seed_init": seed, "data.seed_data": seed + 1},
            **{"model.schedule.peak": given.peak, "model.schedule.warmup": given.warmup},
            **{"model.schedule.horizon": 20 * given.warmup, "data.micro_batch": 16, "data.global_batch": 16},
            **{"trainer.max_steps": given.steps, "trainer.log_every_n_steps": given.every, "validate_every": 10**6},
            **{"trainer.default_root_dir": scratch, "checkpoints.every_steps": 10**6},
            **{"stability.grad_clip": "null", "stability.activation_monitor": "{}"},
            **{"stability.attention_monitor": "{}", "stability.detectors": json.dumps({"surge": surge})},
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        further = [word for word in given.options if word != "--"]
        if run(["fit", "--config", given.config, *words, *further]):
            raise SystemExit("the run could not be started")
    folder = max((Path(given.root) / name).iterdir())
    rows = read(folder)
    lost, surges = lost_at(rows), found_surges(folder)
    before = [surge for surge in surges if lost is None or surge[0] < lost]
    first = before[0] if before else None
    print(f"\nseed {seed}: loss lost at step {lost}; surges before it {len(before)}, the first {first}")
    print(growth(rows, lost or given.steps))
    return None if lost is None or first is None else lost - first[0]


def read(folder: Path) -> dict[int, dict[str, float]]:
    """Logged numbers by step."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    with next(folder.glob("csv-*/metrics.csv")).open() as file:
        for row in csv.DictReader(file):
            step = int(float(row["step"]))
            rows[step].update({key: float(value) for key, value in row.items() if value})
    return rows


def lost_at(rows: dict[int, dict[str, float]]) -> int | None:
    """The first step from which on the loss stays a nat above the lowest before it, or is no number."""
    losses = {step: row["train/loss"] for step, row in sorted(rows.items()) if "train/loss" in row}
    lowest, since = math.inf, None
    for step, loss in losses.items():
        bad = not math.isfinite(loss) or loss > lowest + LOST
        since = (since or step) if bad else None
        lowest = min(lowest, loss) if math.isfinite(loss) else lowest
    return since


def found_surges(folder: Path) -> list[tuple[int, str]]:
    """Step and signal of each surge that was found, in order."""
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted((event["step"], event["evidence"]["signal"]) for event in events if event["kind"] == "surge")


def growth(rows: dict[int, dict[str, float]], until: int) -> str:
    """By how much the root mean squares of the new blocks have grown from step ``FROM`` to just before ``until``."""
    measured = sorted(step for step, row in rows.items() if any(key.startswith(PREFIX) for key in row))
    begin = next(step for step in measured if step >= FROM)
    end = max(step for step in measured if step < until)
    layers = sorted(
        {key.removeprefix(PREFIX).rpartition(".")[0] for key in rows[begin] if key.startswith(PREFIX + NEW)}
    )
    lines = [f"  growth from step {begin} to {end}: " + "".join(f"{role:>9}" for role in ROLES)]
    for layer in layers:
        ratios = [rows[end].get(f"{PREFIX}{layer}.{r}", math.nan) / rows[begin][f"{PREFIX}{layer}.{r}"] for r in ROLES]
        lines.append(f"    {layer:28}" + "".join(f"{ratio:9.3g}" for ratio in ratios))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
