"""What happened to a run, as it happens: one channel for all callbacks, a file of lines, and who else wants to know."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .base import StabilityCallback, find_or_install, rank_zero_info, rank_zero_warn
from .evidence_words import in_words
from .plain_values import plain
from .text_log import log_text

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

FILE = "events.jsonl"


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    step: int
    """Optimizer step, counted from 1."""
    kind: str
    """What it is, as a word: ``slow_step``, ``spike``."""
    evidence: dict[str, Any]
    """The numbers and names behind it: strings, numbers, lists and dicts of those."""
    samples: list[int] | None = None
    """The samples concerned, where they are known: the first one's stream index, and the one behind the last."""
    rank: int | None = None
    """The one rank that knows of it; ``None``: every rank does, so that all may act on it alike."""
    text: str | None = None
    """The sentence for people, where a callback has one of its own."""

    def sentence(self) -> str:
        """For people, on one line."""
        if self.text is not None:
            return self.text
        found = in_words(self.kind, self.evidence)
        where = "" if self.rank is None else f"rank {self.rank}, "
        return f"{where}step {self.step}: {self.kind.replace('_', ' ')}{': ' if found else ''}{found}"


Listener = Callable[[Event], None]


def emit(trainer: Trainer, event: Event, warns: bool = True) -> None:
    """Tell of an event: one line for people, one in the file, a text to the loggers, and all who listen.

    People are warned; or informed, with ``warns=False``, of what they have asked for. With ``event.rank`` of ``None``
    every rank calls, with an equal event; rank 0 writes it down. Otherwise that rank calls alone, from any thread. No
    collective, no wait for the device; a file that cannot be written is warned of.
    """
    Events.of(trainer).emit(trainer, event, warns)


class Events(StabilityCallback):
    """Take events from any callback and pass them on; see :func:`emit`. It installs itself, in ``setup`` of others.

    The file is ``events.jsonl`` in ``folder``: one JSON object per line with the fields of :class:`Event`, and only
    ever appended to. A number that is not finite stands there as a string. An event of one rank other than 0 goes to
    ``events.rankN.jsonl``, so that no two processes write one file. After a resume what follows the checkpoint happens,
    and is written, again.

    Nothing is logged as a number. As a text, at the event's step and with the key ``events/KIND``, its sentence goes to
    every logger that takes text.

    Attributes:
        folder: Where the file lies; unless it was set before, the trainer's ``log_dir`` from the start of training on,
            and its ``default_root_dir`` before.
        listeners: By name, what is called with every event on every rank that emits it, in the order of names.
        answered: Kinds of event that somebody acts upon; who would end the run over one of these does not.

    Example::

        >>> Trainer(callbacks=[Events()], logger=False)  # doctest: +SKIP
        >>> emit(trainer, Event(7, "slow_step", {"seconds": 2.5, "rank": 1, "host": "node-3"}))  # doctest: +SKIP
    """

    order: ClassVar[int] = 1

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.listeners: dict[str, Listener] = {}
        self.answered: set[str] = set()
        self._lock = threading.Lock()
        self._failed = False

    @staticmethod
    def of(trainer: Trainer) -> Events:
        """The trainer's channel, installed if it has none yet."""
        return find_or_install(trainer, Events)

    def emit(self, trainer: Trainer, event: Event, warns: bool = True) -> None:
        """See the function of this name."""
        tell = rank_zero_warn if warns else rank_zero_info
        tell(event.sentence())
        if event.rank is not None or trainer.is_global_zero:
            self._write(event, self.folder or Path(trainer.default_root_dir), trainer.global_rank)
        if event.rank is None:
            log_text(trainer, f"events/{event.kind}", event.sentence(), event.step)
        for _, listener in sorted(self.listeners.items()):
            listener(event)

    def _write(self, event: Event, folder: Path, rank: int) -> None:
        line = json.dumps(plain(asdict(event)), allow_nan=False) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._lock, (folder / (f"events.rank{rank}.jsonl" if rank else FILE)).open("a") as file:
                file.write(line)
        except OSError as error:
            if not self._failed:
                rank_zero_warn(f"Events: cannot write to {folder}: {error}; the run goes on.")
            self._failed = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = trainer.log_dir  # a collective: every rank asks
        if self.folder is None and folder is not None:
            self.folder = Path(folder)


def read_events(path: Path) -> list[Event]:
    """The events in a file, in the order in which they were written; a line that a kill cut short is left out."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(Event(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return found
