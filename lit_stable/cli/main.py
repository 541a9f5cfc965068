"""Which command was asked for, and with which code its process ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_stable.callbacks import KillFileExists
from lit_stable.callbacks.recovery_exit import STOPPED, Rewind
from lit_stable.callbacks.run_control import STOPPED as ORDERED
from lit_stable.cli.average import run_average
from lit_stable.cli.caption import run_caption
from lit_stable.cli.check_devices import run_check_devices
from lit_stable.cli.command import Command
from lit_stable.cli.ctl import run_ctl
from lit_stable.cli.diagnose import run_diagnose
from lit_stable.cli.dump_batch import run_dump_batch
from lit_stable.cli.errors import RunFailed, RunStopped, UserError, is_for_the_user
from lit_stable.cli.exchange import run_export, run_import
from lit_stable.cli.generate import run_generate
from lit_stable.cli.inspect_checkpoint import run_inspect
from lit_stable.cli.lightning_cli import LitStableCLI
from lit_stable.cli.prepare import run_prepare
from lit_stable.cli.recipe import expand_arguments
from lit_stable.cli.recipes import run_recipes
from lit_stable.cli.replay import run_replay
from lit_stable.cli.runs import run_runs
from lit_stable.run.console import quiet_lightning
from lit_stable.strategies import fsdp1, fsdp2

FAILED, USAGE_ERROR = 1, 2

#: Subcommands that read no recipe; what they return is the exit code, None as 0.
_ALONE: dict[str, Callable[[Sequence[str]], int | None]] = {
    "prepare": run_prepare,
    "diagnose": run_diagnose,
    "inspect": run_inspect,
    "dump-batch": run_dump_batch,
    "replay": run_replay,
    "ctl": run_ctl,
    "check-devices": run_check_devices,
    "runs": run_runs,
    "recipes": run_recipes,
    "export": run_export,
    "import": run_import,
    "generate": run_generate,
    "average": run_average,
    "caption": run_caption,
}


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the process's exit code."""
    name, rest = argv[0], list(argv[1:])
    quiet_lightning()
    fsdp1.register_strategies()
    fsdp2.register_strategies()
    try:
        if name == "check" and rest[:1] == ["--devices"] and all(word.startswith("-") for word in rest[1:2]):
            name, rest = "check-devices", rest[1:]  # no number of them to plan for
        if name in _ALONE:
            return _ALONE[name](rest) or 0
        return LitStableCLI(Command(name, rest, *expand_arguments(rest))).exit_code
    except (RunFailed, RunStopped, Rewind, KillFileExists) as error:
        print(f"lit-stable {name}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, Rewind):
            return error.exit_code
        return {RunFailed: FAILED, RunStopped: STOPPED, KillFileExists: ORDERED}[type(error)]
    except (UserError, MisconfigurationException, ValueError) as error:
        if not (isinstance(error, UserError) or is_for_the_user(error)):
            raise
        print(f"lit-stable {name}: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
