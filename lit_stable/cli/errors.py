"""Errors that are sentences for the user, and those that are not."""

from __future__ import annotations

import traceback
from pathlib import Path

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.data.store import DamagedStore

PACKAGE = Path(__file__).resolve().parent.parent
_OURS = {PACKAGE, (PACKAGE / "callbacks").resolve()}  # a link in a checkout


class UserError(Exception):
    """Something the user can mend before anything is trained: printed without a traceback."""


class RunFailed(Exception):
    """Something that ended a run which had begun, or a checkpoint that a run cannot go on from, told in a sentence."""


class RunStopped(Exception):
    """The end of a run by the recovery ladder, told in a sentence."""


def is_for_the_user(error: Exception) -> bool:
    """Whether an error's text is a sentence of ours, so that a traceback would only hide it."""
    if isinstance(error, (MisconfigurationException, DamagedStore)):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ValueError) and not _OURS.isdisjoint(Path(last.filename).resolve().parents)


def sentence(error: Exception) -> str:
    """The text of an error, without the traceback that a data worker wraps around it."""
    text = str(error)
    return text.strip().splitlines()[-1].partition(": ")[2] if "Original Traceback" in text else text
