"""What a checkpoint costs training: one save in each turn, at once and in the background, beside none. A script.

"Stands still" is the time within the call; "costs" is what a turn with a save takes longer than one without, so that it
holds also what writing in the background takes from the steps beside it. A turn must last longer than a write. Under
torchrun each rank is a device of one training, and with `--strategy fsdp2` writes its shards.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from throughput import RECIPES, UNCOUNTED, Quiet, fit
from turns import Variant, device_name, now, set_up, take_turns

from lit_stable.callbacks.checkpoint_files import size_on_disk

BETWEEN = 5  # counted steps before the save
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
FIRST = os.environ.get("RANK", "0") == "0"
MODES = {"no save": None, "at once": "false", "in the background": "true"}


class SaveOnce(Callback):
    """Saves once in every turn, under one name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stalls: list[float] = []  # seconds
        self._first = 0

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self._first = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self._first + UNCOUNTED + BETWEEN:
            since = now()
            trainer.save_checkpoint(self.path)
            self.stalls.append(time.perf_counter() - since)


def without_save(size: str, root: str, counted: int, strategy: str, **changed: Any) -> Variant:
    """A fit on all ranks, each with the recipe's micro-batch."""
    devices = {"trainer.devices": RANKS, "data.global_batch": RANKS * RECIPES[size][1].micro_batch}
    return fit(size, root, counted, **{"trainer.strategy": strategy, **devices, **changed})


def with_save(size: str, root: str, counted: int, strategy: str, in_background: str) -> tuple[Variant, SaveOnce]:
    """A fit that saves once in every turn."""
    variant = without_save(size, root, counted, strategy, **{"checkpoints.in_background": in_background})
    saver = SaveOnce(Path(root) / f"in_background_{in_background}.ckpt")
    variant.trainer.callbacks.insert(-1, saver)  # the stopwatch is the last
    return variant, saver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=RECIPES, default="124m", help="tiny: to try the script on a CPU")
    parser.add_argument("--strategy", default="auto", help="fsdp2, fsdp or fsdp2_full, ddp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="counted steps in a turn")
    parser.add_argument("--folder", help="where checkpoints are written; by default where temporary files are")
    arguments = parser.parse_args()
    set_up()
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        found: dict[str, Quiet] = {}
        savers: dict[str, SaveOnce] = {}
        for mode, in_background in MODES.items():
            if in_background is None:
                found[mode] = Quiet(without_save(arguments.size, root, arguments.steps, arguments.strategy))
            else:
                run = arguments.size, root, arguments.steps, arguments.strategy
                variant, savers[mode] = with_save(*run, in_background)
                found[mode] = Quiet(variant)
            found[mode].turn()  # compiles, and page-locks memory for a copy
        seconds = take_turns(found, arguments.rounds)
        sizes = {mode: size_on_disk(saver.path) / 2**30 for mode, saver in savers.items() if FIRST}
    if not FIRST:
        return
    print(f"{time.strftime('%Y-%m-%d')}, {device_name()}, torch {torch.__version__}, lightning {lightning.__version__}")
    step = statistics.median(seconds["no save"])
    rounds = f"{arguments.rounds} rounds of {arguments.steps} steps of {step * 1e3:.2f} ms"
    print(f"{arguments.size}, {RANKS} devices, {arguments.strategy}, {rounds}")
    print("| a save | GiB | stands still, the first, s | the next, s | costs, s |")
    print("|---|--:|--:|--:|--:|")
    for mode, saver in savers.items():
        first, *rest = saver.stalls
        costs = [
            (own - without) * arguments.steps for own, without in zip(seconds[mode], seconds["no save"], strict=True)
        ]
        print(
            f"| {mode} | {sizes[mode]:.2f} | {first:.2f} | {min(rest):.2f}-{max(rest):.2f}"
            f" | {min(costs):.2f}-{max(costs):.2f} |"
        )


if __name__ == "__main__":
    main()
