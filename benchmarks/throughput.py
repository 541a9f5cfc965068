"""Measure tokens per second of `lit-stable fit` on one device against a plain compiled loop, and LitGPT's model.

Ours is the real trainer with the real data path, logging, and every stability feature that a run has by default and
GradSpikeSkip; a step is one micro-batch, the dearest case. The others do nothing but train. All take turns, round after
round, forwards and backwards, in one process; each has its model on the device all the time. A script; it is no test.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning
import torch
from plain_loop import Shape, litgpt, plain
from turns import Stopwatch, Variant, build, device_name, ratios, set_up, take_turns

UNCOUNTED = 12  # steps of a turn of ours: in the tenth Lightning makes its records of what is logged
BESIDE = ["whole", "head", "true", "eight_bit", "litgpt", "litgpt_true"]  # what takes turns with the two, if asked for
OURS, PLAIN = "lit-stable fit", "plain loop"
RECIPES: dict[str, tuple[str, Shape, dict[str, Any]]] = {
    "124m": ("gpt2_124m", Shape(12, 12, 768, 1024, 32), {}),
    "1b3": ("gpt_1b3", Shape(24, 16, 2048, 2048, 8), {"trainer.strategy": "auto"}),
    "tiny": (
        "gpt2_124m",
        Shape(2, 2, 64, 64, 2, 320),
        {"model.gpt.n_layer": 2, "model.gpt.n_head": 2, "model.gpt.d_model": 64, "model.gpt.max_length": 64}
        | {"model.gpt.vocab_size": 320, "data.sequence_length": 64, "data.micro_batch": 2},
    ),
}


def fit(size: str, root: str, counted: int, *fragments: str, **changed: str) -> Variant:
    """The recipe of this size with a global batch of one micro-batch, as `lit-stable fit` runs it."""
    recipe, shape, options = RECIPES[size]
    one = {"data.global_batch": shape.micro_batch, "trainer.log_every_n_steps": 10}
    with contextlib.redirect_stdout(io.StringIO()):
        cli = build([recipe, "stability/grad_spike_skip", *fragments], root, **{**options, **one, **changed})
    stopwatch = Stopwatch(UNCOUNTED, counted)
    cli.trainer.callbacks.append(stopwatch)
    return Variant(cli.trainer, cli.model, cli.datamodule, stopwatch)


class Quiet:
    """Keeps to itself what a contender prints, and how much memory a turn of it needs."""

    def __init__(self, contender: Any) -> None:
        self.contender = contender
        self.peak = 0  # bytes beyond what all contenders hold between turns; what it holds itself is added by `held`

    def turn(self) -> float:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        with contextlib.redirect_stdout(io.StringIO()):
            taken: float = self.contender.turn()
        if cuda:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before)
        return taken


def makers(size: str, root: str, counted: int) -> dict[str, tuple[str, Callable[[], Any]]]:
    """What can be measured: by its name on the command line the name in the table, and how it is made."""
    shape = RECIPES[size][1]
    return {
        "plain": (PLAIN, lambda: plain(shape, counted)),
        "fit": (OURS, lambda: fit(size, root, counted)),
        "whole": (f"{OURS}, `model.compile: whole`", lambda: fit(size, root, counted, **{"model.compile": "whole"})),
        "head": (f"{OURS}, `head_fp32`", lambda: fit(size, root, counted, **{"model.gpt.head_fp32": "true"})),
        "true": (f"{OURS}, `bf16-true`", lambda: fit(size, root, counted, **{"trainer.precision": "bf16-true"})),
        "eight_bit": (f"{OURS}, `EightBitAdam`", lambda: fit(size, root, counted, "stability/eight_bit_adam")),
        "litgpt": ("LitGPT's model, bf16-mixed", lambda: litgpt(shape, counted)),
        "litgpt_true": ("LitGPT's model, bf16-true", lambda: litgpt(shape, counted, torch.bfloat16)),
    }


def contenders(size: str, root: str, counted: int, asked: list[str]) -> tuple[dict[str, Quiet], dict[str, int]]:
    """By name, each with its first turn behind it, and the bytes that it holds between turns."""
    known = makers(size, root, counted)
    found, held = {}, {}
    for name, make in (known[which] for which in asked):
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        try:
            found[name] = Quiet(make())
        except ImportError as error:
            print(f"{name}: left out ({error})")
            continue
        found[name].turn()  # compiles
        gc.collect()
        held[name] = (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0) - before
        found[name].peak = 0
    return found, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=RECIPES, default="124m", help="tiny: to try the script on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="counted steps in a turn")
    parser.add_argument("--beside", nargs="*", choices=BESIDE, default=["litgpt"], help="what takes turns with the two")
    arguments = parser.parse_args()
    set_up()
    torch.set_float32_matmul_precision("high")
    shape = RECIPES[arguments.size][1]
    with tempfile.TemporaryDirectory() as root:
        found, held = contenders(arguments.size, root, arguments.steps, ["plain", "fit", *arguments.beside])
        seconds = take_turns(found, arguments.rounds)
    print(f"{time.strftime('%Y-%m-%d')}, {device_name()}, torch {torch.__version__}, lightning {lightning.__version__}")
    print(f"{shape}, {arguments.rounds} rounds of {arguments.steps} steps")
    print("| Program | tokens/s, median | range | times the plain loop (range) | peak memory, GiB |")
    print("|---|--:|--:|--:|--:|")
    for name, own in seconds.items():
        rates = [shape.micro_batch * shape.length / taken for taken in own]
        median, least, most = ratios(seconds, name, PLAIN)
        peak = (held[name] + found[name].peak) / 2**30
        print(
            f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f}-{max(rates):,.0f}"
            f" | {median:.3f} ({least:.3f}-{most:.3f}) | {peak:.1f} |"
        )


if __name__ == "__main__":
    main()
