"""Orders to a run under way, and the record of those that were carried out.

An order is a small file in ``RUN/control``, put there whole by a rename. What became of it is a line of
``RUN/control.jsonl``, on disk before anything is done: killed in between, a run does nothing twice, and a change of the
learning rate is in force from the same step on after any resume.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
import warnings
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from .line_file import append_lines
from .whole_file import write_whole

INBOX, LEDGER = "control", "control.jsonl"
ACTIONS = ("save", "stop", "validate")
#: Exit code of a process whose run was stopped by an order or by the kill file.
STOPPED = 4
_RATE = re.compile(r"lr\*=(?P<factor>\S+)")


@dataclass(frozen=True)
class Order:
    """What somebody asked for."""

    id: str
    """Unlike any other's."""
    action: str
    """``save``, ``stop``, ``validate`` or ``lr``."""
    factor: float | None = None
    """Of ``lr``: what the learning rate is multiplied by from then on."""
    asked: str = ""
    """When, in UTC."""


@dataclass(frozen=True)
class Done:
    """An order that was carried out: one line of the ledger."""

    number: int
    """Its place in the ledger, from 1."""
    run: str
    """Whose order it was; checkpoints carry the same word."""
    id: str
    action: str
    step: int
    """Optimizer steps that were behind the run; a new rate is in force from the next one on."""
    factor: float | None = None
    asked: str = ""
    time: str = ""


def new_order(words: str) -> Order:
    """The order that ``save``, ``stop``, ``validate`` or ``lr*=FACTOR`` means.

    Raises:
        ValueError: when it means none.
    """
    factor = None
    if match := _RATE.fullmatch(words):
        factor = _factor(match["factor"])
    elif words not in ACTIONS:
        raise ValueError(f"{words!r}: is no order; write save, stop, validate or 'lr*=0.67'.")
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"  # in the order of asking
    return Order(name, words if factor is None else "lr", factor, now())


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (0 < factor < math.inf):
        raise ValueError(f"lr*={text}: must be a number above 0, as in 'lr*=0.67'.")
    return factor


def place(folder: Path, order: Order) -> Path:
    """Put an order where the run in ``folder`` looks for it; the file's path."""
    inbox = folder / INBOX
    inbox.mkdir(exist_ok=True)
    path = inbox / f"{order.id}.json"
    write_whole(path, json.dumps(asdict(order)))
    return path


def waiting(folder: Path) -> list[tuple[Path, Order]]:
    """The orders that wait for a run, oldest first; what is no order is said and removed."""
    found = []
    inbox = folder / INBOX
    for path in sorted(inbox.glob("*.json")) if inbox.is_dir() else []:
        try:
            order = Order(**json.loads(path.read_text()))
            if not _is_order(order):
                raise ValueError
        except FileNotFoundError:  # another rank's view of the folder is older
            continue
        except OSError as error:  # a folder, or one without the right to read it: left where it is
            warnings.warn(f"{path}: cannot be read ({error.strerror}), so it is no order.", stacklevel=2)
        except (ValueError, TypeError):
            warnings.warn(f"{path}: is no order, and is removed; give one with `lit-stable ctl`.", stacklevel=2)
            path.unlink(missing_ok=True)
        else:
            found.append((path, order))
    return found


def _is_order(order: Order) -> bool:
    factor = order.factor
    if not isinstance(order.id, str) or order.action not in (*ACTIONS, "lr"):
        return False
    return (isinstance(factor, (int, float)) and 0 < factor < math.inf) if order.action == "lr" else factor is None


def read_ledger(folder: Path) -> list[Done]:
    """The lines of a run's ledger; one that a kill cut short is left out."""
    path, found = folder / LEDGER, []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            found.append(Done(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def write_ledger(folder: Path, lines: list[Done]) -> None:
    """Add lines, all or none, and wait until they are on disk.

    Raises:
        OSError: when they cannot be written.
    """
    append_lines(folder / LEDGER, [json.dumps(asdict(line)) for line in lines])


def now() -> str:
    """The time of day in UTC, for people alone: nothing depends on it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
