"""`lit-stable diagnose LOG`: what the detectors find in a run's scalars, first sign first, and what to try."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_stable.diagnosis.scalars import NAMES


def run_diagnose(argv: Sequence[str]) -> None:
    """Parse the arguments of ``diagnose`` and print the page."""
    parser = ArgumentParser(
        prog="lit-stable diagnose",
        description="Run the detectors over a run's log: TensorBoard or CSV, of this trainer or another.",
    )
    parser.add_argument("log", type=Path, help="CSV file, TensorBoard event file, or a folder that holds such files.")
    parser.add_argument(
        "--names",
        type=dict[str, str],
        default={},
        help=f"Scalar -> name in the log, where it is not recognised; scalars: {', '.join(NAMES)}.",
    )
    arguments = parser.parse_args(list(argv))

    from lit_stable.diagnosis.log_page import diagnose  # late: it takes seconds

    print(diagnose(arguments.log, arguments.names))
