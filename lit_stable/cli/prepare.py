"""`lit-stable prepare INPUT... --out DIR`: text becomes a token store."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lit_stable.data.prepare import prepare


def run_prepare(argv: Sequence[str]) -> None:
    """Parse the arguments of ``prepare`` and run it."""
    parser = ArgumentParser(prog="lit-stable prepare", description="Turn text and JSONL files into a token store.")
    parser.add_argument("inputs", nargs="+", help="Text files, .jsonl files, or globs of them.")
    parser.add_function_arguments(prepare, skip={"inputs", "report"})
    arguments = parser.parse_args(list(argv))
    prepare(**arguments.as_dict())
