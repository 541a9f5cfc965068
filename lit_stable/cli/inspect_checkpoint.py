"""`lit-stable inspect CKPT [CKPT]`: what a checkpoint's tensors give away, or what changed most between two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser


def run_inspect(argv: Sequence[str]) -> None:
    """Parse the arguments of ``inspect`` and print the page."""
    parser = ArgumentParser(
        prog="lit-stable inspect", description="Look into a Lightning checkpoint, or compare two of one model."
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, help="One or two files or sharded folders.")
    parser.add_argument("--lines", type=int, default=20, help="Tensors to list, the most remarkable first; 0: all.")
    parser.add_argument(
        "--trust", type=bool, default=False, help="Load objects that may run code; only your own files."
    )
    arguments = parser.parse_args(list(argv))
    if arguments.lines < 0:
        raise ValueError(f"lines={arguments.lines}: must be 0 or more; 0 lists all.")

    from lit_stable.diagnosis.checkpoint_page import compare, inspect  # late: it takes seconds
    from lit_stable.diagnosis.checkpoint_tensors import open_checkpoint

    opened = [open_checkpoint(path, arguments.trust) for path in arguments.checkpoints]
    if len(opened) > 2:
        raise ValueError(f"{len(opened)} checkpoints: one is inspected or two are compared; give one or two.")
    print(inspect(opened[0], arguments.lines) if len(opened) == 1 else compare(opened[0], opened[1], arguments.lines))
