"""`lit-stable replay RUN --step S`: that step once more, from the nearest checkpoint."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path


def run_replay(argv: Sequence[str]) -> int:
    """Parse the arguments of ``replay`` and print the page; 1 where the step is not what it was."""
    parser = ArgumentParser(
        prog="lit-stable replay",
        description="Take a step of a run again, from the nearest checkpoint: is it the same, which module's output"
        " was out of the ordinary, which samples were worst. Run from where the run was, under torchrun with as many"
        " ranks for the same bits. Further options go over the recipe: --trainer.deterministic true.",
    )
    parser.add_argument("run", type=Path, help="Run folder, as runs/quickstart/0001.")
    parser.add_argument("--step", type=int, required=True, help="Optimizer step, counted from 1.")
    parser.add_argument("--at", default=None, help="Checkpoint, or RUN@STEP, to begin at; the nearest by default.")
    parser.add_argument("--runs", type=int, default=2, help="Replays, to measure by how much they differ, >= 2.")
    parser.add_argument("--worst", type=int, default=4, help="Samples to show as text.")
    known, words = parser.parse_known_args(list(argv))
    if known.runs < 2:
        raise ValueError(f"runs={known.runs}: must be at least 2, or nothing is known of the noise between them.")
    if known.worst < 0:
        raise ValueError(f"worst={known.worst}: must be 0 or more.")

    from lit_stable.replay.page import replay  # late: it takes seconds

    page, same = replay(known.run, known.step, known.at, known.runs, known.worst, words)
    if int(os.environ.get("RANK", 0)) == 0:
        print(page, flush=True)
    return 0 if same else 1
