"""Measure what the callbacks cost: each alone, and all that a run has by default together. A script; it is no test.

Each variant is a Trainer of its own around one and the same model, and is compared with one that has nothing of ours
but the counters that the model's schedule reads. Variants take turns, round after round, forwards and backwards. A turn
trains some steps that do not count, then those that do, between two waits for the device. "nothing, again" shows how
far two equal runs lie apart.

Two tables. In the first a step is one micro-batch, the dearest case: what is paid per step is paid for every
micro-batch. In the second a step is the recipe's own, 16 micro-batches.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from turns import NEVER, Built, Stopwatch, Variant, build, device_name, set_up, take_turns

from lit_stable.callbacks import (
    AccumulationWindows,
    GracefulStop,
    GradClip,
    GradNorm,
    GradSpikeSkip,
    LayerNormFreeze,
    LROverride,
    Progress,
    SafeCheckpoints,
    SequenceLengthWarmup,
    StepSeed,
    UpdateClip,
    ValidateEverySteps,
)
from lit_stable.run.report import Report

NOTHING, AGAIN, ALL = "nothing", "nothing, again", "all that a run has by default"
MONITORED = "and all monitors"
CONFIGS = ["gpt2_124m", "stability/grad_spike_skip"]
SIZES: dict[str, dict[str, Any]] = {
    "124m": {},
    "tiny": {
        **{"model.gpt.n_layer": 2, "model.gpt.n_head": 2, "model.gpt.d_model": 64, "model.gpt.max_length": 64},
        **{"model.gpt.vocab_size": 320, "model.compile": "off", "trainer.precision": "32-true"},
        **{"data.sequence_length": 64, "data.micro_batch": 2, "data.global_batch": 32},
    },
}
# Callbacks that do their work at every step, with arguments with which that work is the same as without them.
ALONE: dict[str, Callable[[Any], Callback]] = {
    "StepSeed": lambda data: StepSeed(),
    "AccumulationWindows": lambda data: AccumulationWindows(data.global_batch, data.micro_batch),
    "GradNorm": lambda data: GradNorm(),
    "ValidateEverySteps": lambda data: ValidateEverySteps(NEVER),
    "SafeCheckpoints": lambda data: SafeCheckpoints(),
    "GracefulStop": lambda data: GracefulStop(),
    "Report": lambda data: Report(""),
    "GradClip": lambda data: GradClip(1.0),
    "GradSpikeSkip": lambda data: GradSpikeSkip(),
    "UpdateClip": lambda data: UpdateClip(1e9),
    "LROverride": lambda data: LROverride(factor=1.0, weight_decay=0.1),
    "LayerNormFreeze": lambda data: LayerNormFreeze([{"start": 0}], action="log"),
    "SequenceLengthWarmup": lambda data: SequenceLengthWarmup(f"{data.sequence_length} for 1 steps"),
}


def variants(cli: Built, module: Any, alone: bool, uncounted: int, counted: int) -> dict[str, Variant]:
    """By name: nothing, what each costs if so asked, nothing again, and all."""
    data = cli.datamodule

    def make(callback: Callback | None) -> Variant:
        opens_windows = isinstance(callback, AccumulationWindows)
        window = 1 if opens_windows else data.global_batch // data.micro_batch
        stopwatch = Stopwatch(uncounted, counted)
        own = [Progress(), *([callback] if callback else []), stopwatch]
        options = {**cli.trainer_options, "callbacks": own, "accumulate_grad_batches": window}
        return Variant(Trainer(**options), module, data, stopwatch)

    found = {NOTHING: make(None)}
    if alone:
        found.update({name: make(callback(data)) for name, callback in ALONE.items()})
    stopwatch = Stopwatch(uncounted, counted)
    cli.trainer.callbacks.append(stopwatch)
    return {**found, AGAIN: make(None), ALL: Variant(cli.trainer, module, data, stopwatch)}


def table(title: str, seconds: dict[str, list[float]], bare: str = NOTHING) -> str:
    """Median time per step, and how much more than the first in the same round: median and range over the rounds."""
    lines = [title, f"  {'':<32}{'ms/step':>10}{'more':>12}{'least and most':>24}"]
    for name, own in seconds.items():
        more = [100 * (mine / other - 1) for mine, other in zip(own, seconds[bare], strict=True)]
        spread = f"{min(more):+.2f} to {max(more):+.2f} %"
        lines.append(
            f"  {name:<32}{1e3 * statistics.median(own):>10.3f}{statistics.median(more):>+10.2f} %{spread:>24}"
        )
    return "\n".join(lines)


def with_monitors(size: str, root: str, module: Any, counted: int) -> dict[str, Variant]:
    """What a run has by default, without and with the monitors of their fragment, on the recipe's own steps."""
    found = {}
    for name, configs in ((ALL, CONFIGS), (MONITORED, [*CONFIGS, "stability/monitors"])):
        cli = build(configs, root, **SIZES[size])
        stopwatch = Stopwatch(2, counted)
        cli.trainer.callbacks.append(stopwatch)
        found[name] = Variant(cli.trainer, module, cli.datamodule, stopwatch)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="124m", help="tiny: to try the script on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of one micro-batch in a turn")
    parser.add_argument("--recipe_steps", type=int, default=2, help="counted steps of the recipe's own in a turn")
    parser.add_argument("--monitors", type=int, metavar="STEPS", help="instead: all monitors, so many steps in a turn")
    arguments = parser.parse_args()
    set_up()
    print(f"{time.strftime('%Y-%m-%d')}, {device_name()}, torch {torch.__version__}, lightning {lightning.__version__}")
    with tempfile.TemporaryDirectory() as root:
        said = io.StringIO()  # what the runs print
        with contextlib.redirect_stdout(said):
            recipe = build(CONFIGS, root, **SIZES[arguments.size])
            module, micro_batch = recipe.model, recipe.datamodule.micro_batch
            batch = recipe.datamodule.global_batch
        if arguments.monitors:
            with contextlib.redirect_stdout(said):
                found = with_monitors(arguments.size, root, module, arguments.monitors)
                found[ALL].turn()
                found[MONITORED].turn()
                watched = take_turns(found, arguments.rounds)
            print(table(f"a step of {batch} samples, {arguments.monitors} steps in a turn:", watched, ALL))
            return
        with contextlib.redirect_stdout(said):
            small = build(CONFIGS, root, **SIZES[arguments.size], **{"data.global_batch": micro_batch})
            found = variants(small, module, True, 2, arguments.steps)
            found[NOTHING].turn()  # compiles
            each = take_turns(found, arguments.rounds)
        print(table(f"a step of {micro_batch} samples, one micro-batch:", each), flush=True)
        with contextlib.redirect_stdout(said):
            own = take_turns(variants(recipe, module, False, 1, arguments.recipe_steps), arguments.rounds)
        print(table(f"a step of {batch} samples, {batch // micro_batch} micro-batches:", own))


if __name__ == "__main__":
    main()
