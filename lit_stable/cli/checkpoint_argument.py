"""What a command without a recipe takes for a checkpoint."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

from lit_stable.run.folder import find_checkpoint

CHECKPOINT = "File, sharded folder, run folder (its last checkpoint) or RUN@STEP."


def add_root(parser: ArgumentParser) -> None:
    """Add the folder below which ``RUN@STEP`` is looked up."""
    parser.add_argument("--root", type=Path, default=Path("runs"), help="Folder of all runs, for RUN@STEP.")


def named_checkpoint(given: str, root: Path) -> Path:
    """The checkpoint that an argument means, as ``--ckpt_path`` has it.

    Raises:
        ValueError: when there is none; ``last`` means nothing where no recipe names a run.
    """
    if given == "last":
        raise ValueError("checkpoint=last: of which run? give its folder, as runs/quickstart/0001.")
    try:
        return find_checkpoint(given, root, "")
    except ValueError as error:
        raise ValueError(str(error).replace("ckpt_path=", "checkpoint=", 1)) from error
