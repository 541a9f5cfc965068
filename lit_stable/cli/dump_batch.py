"""`lit-stable dump-batch RUN --step S`: the samples that a run read at a step, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser


def run_dump_batch(argv: Sequence[str]) -> None:
    """Parse the arguments of ``dump-batch`` and print the page."""
    parser = ArgumentParser(
        prog="lit-stable dump-batch", description="Print the samples that a run read at an optimizer step."
    )
    parser.add_argument("run", type=Path, help="Run folder, as runs/quickstart/0001; run from where the run was.")
    parser.add_argument("--step", type=int, required=True, help="Optimizer step, counted from 1.")
    parser.add_argument("--rank", type=int, default=None, help="One data-parallel rank; all of them by default.")
    parser.add_argument("--text", action="store_true", help="Print the text of each sample under its line.")
    arguments = parser.parse_args(list(argv))

    from lit_stable.run.batch_page import dump_batch  # late: it takes seconds

    print(dump_batch(arguments.run, arguments.step, arguments.rank, arguments.text))
