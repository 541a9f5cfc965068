"""How long before the loss do activations surge, and where first: a run that dies by itself, by several seeds.

    lit-stable fit --config hf_vlm/language && lit-stable fit --config hf_vlm/vision
    python benchmarks/activation_surge.py

Nothing is made to go wrong: the new blocks of `hf_vlm/captions` train without norms of queries and keys, without
clipping, at a rate that rises until it is far too high. Printed for each seed: the step at which the loss is lost, the
step of the first surge that the detector finds, their distance, and by role and layer how much activations have grown
until then.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import statistics
import tempfile
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch

from lit_stable.cli.main import run

PREFIX = "stability/activation_rms/"
LOST = 1.0  # nats above the lowest loss so far


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
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, torch {torch.__version__}, peak {given.peak:g} at step {given.warmup}"
    )
    leads = [measure(given, seed) for seed in given.seeds]
    known = [lead for lead in leads if lead is not None]
    print(f"\nlead in steps by seed: {leads}" + (f", median {statistics.median(known)}" if known else ""))


def measure(given: argparse.Namespace, seed: int) -> int | None:
    """One run; steps from the first surge to the loss that is lost, None where one of them is not."""
    name = f"surge-{given.peak:g}-{seed}"
    with tempfile.TemporaryDirectory() as scratch:
        surge = {"factor": 2.0, "window": 20, "warmup": 20}
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
    lost, first = lost_at(rows), first_surge(folder)
    print(f"\nseed {seed}: loss lost at step {lost}, first surge {first}")
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


def first_surge(folder: Path) -> tuple[int, str] | None:
    """Step and signal of the first surge that was found."""
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    surges = [(event["step"], event["evidence"]["signal"]) for event in events if event["kind"] == "surge"]
    return min(surges, default=None)


def growth(rows: dict[int, dict[str, float]], until: int) -> str:
    """Root mean square of each role and layer at step 20, and by how much it has grown just before ``until``."""
    measured = sorted(step for step, row in rows.items() if any(key.startswith(PREFIX) for key in row))
    begin = next((step for step in measured if step >= 20), measured[0])
    end = max((step for step in measured if step < until), default=measured[-1])
    lines = [f"  growth of activations, step {begin} to {end}:"]
    for key, value in rows[begin].items():
        if key.startswith(PREFIX + "sight.blocks") or key.startswith(PREFIX + "gpt.blocks"):
            lines.append(
                f"    {key.removeprefix(PREFIX):32} {value:9.3g} x {rows[end].get(key, math.nan) / value:8.3g}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
