"""`lit-stable average CKPT CKPT...`: the mean of the weights of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_stable.cli.checkpoint_argument import CHECKPOINT, add_root, named_checkpoint


def run_average(argv: Sequence[str]) -> None:
    """Parse the arguments of ``average``, write the checkpoint and say what is in it."""
    parser = ArgumentParser(
        prog="lit-stable average",
        description="Write the mean of the weights of several checkpoints of one model; no optimizer state.",
    )
    parser.add_argument("checkpoints", nargs="+", type=str, help=CHECKPOINT)
    parser.add_argument("--out", type=Path, required=True, help="Checkpoint file to write.")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=None, help="One number for each checkpoint; all alike by default."
    )
    add_root(parser)
    arguments = parser.parse_args(list(argv))
    paths = [named_checkpoint(given, arguments.root) for given in arguments.checkpoints]

    from lit_stable.weights.average import average  # late: it takes seconds

    print("\n".join(average(paths, arguments.out, arguments.shares)))
