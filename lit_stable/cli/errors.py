"""Errors whose text is a sentence for the user, and the code with which each ends the process."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import ClassVar

from lit_stable.callbacks.control_orders import STOPPED as ORDERED
from lit_stable.callbacks.recovery_exit import STOPPED
from lit_stable.data.store import DamagedStore

FAILED, USAGE_ERROR = 1, 2
PACKAGE = Path(__file__).resolve().parent.parent
_OURS = {PACKAGE, (PACKAGE / "callbacks").resolve()}  # a link in a checkout


class CommandEnd(Exception):
    """Ends a command: its text is printed without a traceback."""

    #: Of the process.
    exit_code: ClassVar[int]


class UserError(CommandEnd):
    """Something the user can mend before anything is trained."""

    exit_code = USAGE_ERROR


class RunFailed(CommandEnd):
    """Something that ended a run which had begun, or a checkpoint that a run cannot go on from."""

    exit_code = FAILED


class RunStopped(CommandEnd):
    """The end of a run by the recovery ladder."""

    exit_code = STOPPED


class RunForbidden(CommandEnd):
    """The kill file, which lets no run begin."""

    exit_code = ORDERED


def is_for_the_user(error: Exception) -> bool:
    """Whether an error's text is a sentence of ours, so that a traceback would only hide it."""
    if _is_misconfiguration(error) or isinstance(error, DamagedStore):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ValueError) and not _OURS.isdisjoint(Path(last.filename).resolve().parents)


def exit_code(error: Exception) -> int:
    """With which code an error of ours ends a command; one with a code of its own says it itself."""
    # As below: where nothing has imported it, nothing has raised it.
    loaded = sys.modules.get("lit_stable.callbacks.checkpoint_contents")
    return FAILED if loaded is not None and isinstance(error, loaded.CheckpointError) else USAGE_ERROR


def _is_misconfiguration(error: Exception) -> bool:
    # To import Lightning takes seconds; where nothing has, nothing has raised its exception.
    loaded = sys.modules.get("lightning.fabric.utilities.exceptions")
    return loaded is not None and isinstance(error, loaded.MisconfigurationException)


def sentence(error: Exception) -> str:
    """The text of an error, without the traceback that a data worker wraps around it."""
    text = str(error)
    return text.strip().splitlines()[-1].partition(": ")[2] if "Original Traceback" in text else text
