"""Finds and runs the command that was asked for, and says with which code its process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from lit_stable.callbacks.recovery_exit import Rewind
from lit_stable.cli.errors import FAILED, CommandEnd, exit_code, is_for_the_user
from lit_stable.cli.unusable_file import unusable_file

#: Subcommands that read no recipe, by the file of each: what one does not need it does not wait for.
_ALONE = {
    "prepare": "prepare",
    "diagnose": "diagnose",
    "inspect": "inspect_checkpoint",
    "dump-batch": "dump_batch",
    "replay": "replay",
    "ctl": "ctl",
    "check-devices": "check_devices",
    "runs": "runs",
    "recipes": "recipes",
    "export": "exchange",
    "import": "exchange",
    "generate": "generate",
    "average": "average",
    "caption": "caption",
}
_CONNECTS = ("fit", "validate", "test")


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the process's exit code."""
    name, rest = argv[0], list(argv[1:])
    if name == "check" and rest[:1] == ["--devices"] and all(word.startswith("-") for word in rest[1:2]):
        name, rest = "check-devices", rest[1:]  # no number of them to plan for
    try:
        return _run_alone(name, rest) if name in _ALONE else _run_recipe(name, rest)
    except (CommandEnd, Rewind) as error:
        code, text = error.exit_code, str(error)
    except Exception as error:
        if is_for_the_user(error):
            code, text = exit_code(error), str(error)
        elif (refused := unusable_file(error)) is not None:
            code, text = FAILED, refused
        else:
            _tell_other_hosts(name, f"{type(error).__name__}: {error}")
            raise
    print(f"lit-stable {name}: {text}", file=sys.stderr, flush=True)
    _tell_other_hosts(name, text)
    return code


def _tell_other_hosts(name: str, text: str) -> None:
    """Those of a fit and the like wait for this one, if it ends before they are connected."""
    if name in _CONNECTS and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from lit_stable.strategies.roll_call import report_absent  # late: it takes torch

        report_absent(text)


def _run_alone(name: str, argv: list[str]) -> int:
    """Call ``run_NAME`` of the command's file; what it returns is the exit code, None as 0."""
    module = import_module(f"lit_stable.cli.{_ALONE[name]}")
    function: Callable[[Sequence[str]], int | None] = getattr(module, f"run_{name.replace('-', '_')}")
    return function(argv) or 0


def _run_recipe(name: str, argv: list[str]) -> int:
    # Late: they take seconds, which the commands above need not wait.
    from lit_stable.cli.command import Command
    from lit_stable.cli.lightning_cli import LitStableCLI
    from lit_stable.cli.recipe import expand_arguments
    from lit_stable.cli.recipe_file import RecipeError

    try:
        command = Command(name, argv, *expand_arguments(argv))
    except RecipeError as error:
        if error.rest is None:
            raise
        command = Command(name, argv, *error.rest, tuple(str(error).splitlines()), error.is_whole)
    return LitStableCLI(command).exit_code
