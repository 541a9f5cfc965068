"""`lit-stable prepare INPUT... --out DIR`: text becomes a token store."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lit_stable.data.prepare import prepare

FAILED, INTERRUPTED = 1, 130
_DESCRIPTION = """Turn text files, JSON lines, Parquet and data sets into a token store. Killed or interrupted, the same
command goes on where it was, and the result is the same to the last byte."""


def run_prepare(argv: Sequence[str]) -> int:
    """Parse the arguments of ``prepare`` and run it; returns the process's exit code."""
    parser = ArgumentParser(prog="lit-stable prepare", description=_DESCRIPTION)
    parser.add_argument(
        "inputs", nargs="+", help="Files, folders, globs, data sets on disk, or hf:NAME[:CONFIG][@SPLIT]."
    )
    parser.add_function_arguments(prepare, skip={"inputs", "report", "strict"})
    parser.add_argument(
        "--strict", action="store_true", help="Stop at the first document that cannot be read; else it is left out."
    )
    arguments = parser.instantiate(parser.parse_args(list(argv)))
    try:
        prepare(**vars(arguments))
    except FileExistsError as error:
        print(f"lit-stable prepare: {error}", file=sys.stderr, flush=True)
        return FAILED
    except KeyboardInterrupt:
        print("lit-stable prepare: interrupted.", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0
