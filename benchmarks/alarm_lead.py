"""How long before the loss does each alarm come, and does it come in runs that live: tiny GPTs, several seeds.

    python benchmarks/alarm_lead.py                                  # trains; a quarter of an hour on one core
    python benchmarks/alarm_lead.py --traces tests/traces/*.csv      # recorded runs of others, in seconds

Nothing is made to go wrong. Every run is the quickstart at toy size without clipping, with the detectors at their
defaults and the monitors that feed them; the rate rises for ``--warmup`` steps, to ``--peak``, of which a run dies on
the way, or to ``--healthy``, which it lives through. ``--config stability/NAME`` lays a fragment over all of them.
Printed for every alarm: in how many dying runs it came before the loss was lost, how many steps before, and in how many
runs that live it came too.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from activation_surge import lost_at, read

from lit_stable.callbacks.detector import Detector
from lit_stable.callbacks.slow_divergence import SlowDivergence
from lit_stable.callbacks.spike_alarm import SpikeAlarm
from lit_stable.cli.main import run

TOY = {
    **{"model.gpt.vocab_size": 1024, "data.tokenizer": "bpe:1024", "model.gpt.max_length": 64},
    **{"model.gpt.n_layer": 3, "model.gpt.n_head": 4, "model.gpt.d_model": 64},
    **{"model.schedule.floor": 0.0, "data.sequence_length": 64, "data.micro_batch": 32, "data.global_batch": 32},
    **{"validate_every": 10**6, "checkpoints.every_steps": 10**6, "trainer.log_every_n_steps": 10},
    **{"trainer.accelerator": "cpu", "trainer.devices": 1, "trainer.enable_progress_bar": "false"},
}
WATCH = {
    **{"stability.grad_clip": None, "stability.detectors": {}, "stability.grad_spike_skip": {"action": "log"}},
    **{"stability.recovery_time": {}, "stability.weight_monitor": {}, "stability.update_monitor": {}},
    **{"stability.activation_monitor": {"every_steps": 10}, "stability.attention_monitor": {"every_steps": 10}},
    "stability.output_monitor": {"every_steps": 10},
}
#: Alarms that only say what was seen before, or after.
NO_ALARMS = {"spike_recovered"}


@dataclass
class Watched:
    """A run, and what was said of it."""

    name: str
    lost: int | None
    last: int
    alarms: dict[str, list[int]]
    """Steps of the events, by alarm."""

    def lines(self) -> list[str]:
        """What it came to, and the first step of each alarm."""
        came = f"loss lost at step {self.lost}" if self.lost is not None else f"lives to step {self.last}"
        said = [f"{name} {min(steps)} ({len(steps)})" for name, steps in sorted(self.alarms.items())]
        return [f"{self.name}: {came}", f"    first step (how many): {', '.join(said) or 'no alarm'}"]

    def lead(self, alarm: str) -> int | None:
        """Steps from the first such alarm to the loss that is lost; None: it did not come before."""
        before = [step for step in self.alarms.get(alarm, []) if self.lost is not None and step <= self.lost]
        return None if self.lost is None or not before else self.lost - before[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", type=float, default=0.2, help="Learning rate on the way to which runs die.")
    parser.add_argument("--healthy", type=float, default=0.003, help="Learning rate through which runs live.")
    parser.add_argument("--warmup", type=int, default=1200, help="Steps to that rate.")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", action="append", default=[], help="A fragment over every run.")
    parser.add_argument("--traces", nargs="+", type=Path, help="CSV files with step and loss, instead of training.")
    given = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    print(f"{date.today()}, {machine}")
    if given.traces:
        runs = [replayed(path) for path in given.traces]
    else:
        runs = [trained(given, peak, seed) for peak in (given.peak, given.healthy) for seed in given.seeds]
    print(*page(runs), sep="\n")


def trained(given: argparse.Namespace, peak: float, seed: int) -> Watched:
    """Train one run and read what was said of it."""
    with tempfile.TemporaryDirectory() as root:
        options = {
            **{**TOY, "trainer.max_steps": given.steps, "run.root": root, "run.name": "run"},
            **{"model.schedule.peak": peak, "model.schedule.warmup": given.warmup},
            **{"model.schedule.horizon": 100 * given.warmup, "model.seed_init": seed, "data.seed_data": seed + 1},
            **{key: json.dumps(value) for key, value in WATCH.items()},
        }
        configs = [word for config in ("quickstart", *given.config) for word in ("--config", config)]
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        if run(["fit", *configs, *words]):
            raise SystemExit("the run could not be started")
        (folder,) = (Path(root) / "run").iterdir()
        lost, alarms = lost_at(read(folder)), by_alarm(folder / "events.jsonl")
    found = Watched(f"rate up to {peak:g}, seed {seed}", lost, given.steps, alarms)
    print("", *found.lines(), "", sep="\n", flush=True)
    return found


def by_alarm(path: Path) -> dict[str, list[int]]:
    """Steps of a run's events, by what they are about."""
    found: dict[str, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        event = json.loads(line)
        if event["kind"] not in NO_ALARMS:
            found.setdefault(_alarm(event["kind"], event["evidence"]), []).append(event["step"])
    return found


def _alarm(kind: str, evidence: dict[str, object]) -> str:
    """The kind of an event, with the quantity, whatever its layer."""
    signal = str(evidence.get("signal", "")).removeprefix("stability/").partition("/")[0]
    return f"{kind}: {signal}" if signal else kind


def replayed(path: Path) -> Watched:
    """Show the detectors that need a loss alone what somebody's run has logged."""
    detectors: list[Detector] = [SpikeAlarm(), SlowDivergence()]
    alarms: dict[str, list[int]] = {}
    rows = {step: {"train/loss": loss} for step, loss in _losses(path)}
    for step, row in rows.items():
        for detector in detectors:
            for event in detector.observe(step, {"loss": row["train/loss"]}):
                alarms.setdefault(_alarm(event.kind, dict(event.evidence)), []).append(step)
    return Watched(path.stem, lost_at(rows), max(rows), alarms)


def _losses(path: Path) -> Iterator[tuple[int, float]]:
    with path.open() as file:
        for row in csv.DictReader(file):
            yield int(float(row["step"])), float(row["loss"])


def page(runs: list[Watched]) -> list[str]:
    """What each run came to, and each alarm over all of them."""
    lines = [line for one in runs for line in one.lines()]
    dying, living = [r for r in runs if r.lost is not None], [r for r in runs if r.lost is None]
    heads = ["Alarm", f"Before the loss, of {len(dying)}", "Lead in steps, median (range)"]
    lines += ["", f"| {' | '.join([*heads, f'In runs that live, of {len(living)}'])} |", "|---|---:|---:|---:|"]
    for alarm in sorted({name for one in runs for name in one.alarms}):
        leads = [lead for one in dying if (lead := one.lead(alarm)) is not None]
        spread = f"{statistics.median(leads):g} ({min(leads)} to {max(leads)})" if leads else "-"
        lines += [f"| {alarm} | {len(leads)} | {spread} | {sum(alarm in one.alarms for one in living)} |"]
    return lines


if __name__ == "__main__":
    main()
