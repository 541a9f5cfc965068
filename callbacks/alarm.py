"""Tell somebody who is not looking: run a command or call a webhook when something happens to a run."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import subprocess
import threading
import time
import urllib.request
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from .base import MisconfigurationException, StabilityCallback, rank_zero_warn, refuse_all
from .events import Event, Events
from .plain_values import plain

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_TIMEOUT = 30.0  # seconds for one delivery, and for those still waiting at the end


class Alarm(StabilityCallback):
    """Run a command, or post to a webhook, for events of the run (see :class:`~.events.Events`).

    Rank 0 delivers, in a thread of its own: training never waits for it, and what fails is one warning. A command gets
    the event as JSON on its standard input; a webhook gets it as the body of a POST, with ``text`` for a chat. JSON
    has ``step``, ``kind``, ``evidence``, ``samples`` (stream indices: the first, and the one behind the last), ``text``
    (one sentence), ``run`` (its folder) and ``suppressed``.

    At most one delivery begins in ``every_seconds``; what comes sooner is counted in the next one's ``suppressed``.

    ``${NAME}`` in ``command`` or ``webhook`` is read from the environment when it is needed, so that a recipe, which is
    stored with every checkpoint, holds no secret. The text of a warning holds none either.

    Nothing is logged. Nothing is saved: who resumes is told anew.

    Args:
        command: Program and arguments, as in a shell but without one, such as ``notify-send "lit-stable"``.
        webhook: URL, ``https://`` or ``http://``.
        kinds: Which kinds of event, as shell patterns separated by blanks; ``*`` for all.
        every_seconds: Shortest time between two deliveries, >= 0.

    Raises:
        MisconfigurationException: when neither or both of ``command`` and ``webhook`` are given, when one cannot be
            what it says, or when a variable is not in the environment.

    Example::

        >>> Trainer(callbacks=[Alarm(webhook="https://hooks.example/${TOKEN}")], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 50

    def __init__(
        self, command: str | None = None, webhook: str | None = None, kinds: str = "*", every_seconds: float = 60.0
    ) -> None:
        command = None if command is None else os.fspath(command)
        problems = []
        if (command is None) == (webhook is None):
            problems.append(
                f"`Alarm(command={command!r}, webhook={webhook!r})`: takes one of the two; give a program to run or a"
                " URL to post to."
            )
        if command is not None and not shlex.split(command):
            problems.append(f"`Alarm(command={command!r})`: is empty; give a program to run.")
        if webhook is not None and not webhook.startswith(("https://", "http://", "${")):
            problems.append(f"`Alarm(webhook={webhook!r})`: must begin with https:// or http://.")
        if not every_seconds >= 0:
            problems.append(f"`Alarm(every_seconds={every_seconds})`: must be 0 or more.")
        refuse_all(problems)
        self.command, self.webhook, self.kinds, self.every_seconds = command, webhook, kinds, every_seconds
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._events: Events | None = None
        self._last = -float("inf")  # when the last delivery was asked for, monotonic seconds
        self._suppressed = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        for name in _VARIABLE.findall(f"{self.command} {self.webhook}"):
            if name not in os.environ:
                raise MisconfigurationException(f"`Alarm`: ${{{name}}} is not in the environment; set {name}.")
        self._events = Events.of(trainer)
        if trainer.is_global_zero:
            self._events.listeners["alarm"] = self._take

    def _take(self, event: Event) -> None:
        if not any(fnmatchcase(event.kind, pattern) for pattern in self.kinds.split()):
            return
        now = time.monotonic()
        if now - self._last < self.every_seconds:
            self._suppressed += 1
            return
        folder = self._events.folder if self._events is not None else None
        message = {**plain(asdict(event)), "text": event.sentence(), "run": str(folder or "")}
        message["suppressed"], self._suppressed, self._last = self._suppressed, 0, now
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._deliver_all, name="alarm", daemon=True)
            self._thread.start()
        self._queue.put(message)

    def _deliver_all(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._deliver(json.dumps(message).encode())
            except Exception as error:  # whatever it is, training must not hear of it
                # Not the error's own text, which may hold the expanded command or URL.
                rank_zero_warn(f"Alarm: was not delivered ({type(error).__name__}); the run goes on.")

    def _deliver(self, body: bytes) -> None:
        if self.command is not None:
            program = [_expanded(word) for word in shlex.split(self.command)]
            subprocess.run(
                program, input=body, timeout=_TIMEOUT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            return
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(_expanded(str(self.webhook)), data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT):
            pass

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._events is not None:
            self._events.listeners.pop("alarm", None)
        self._events = None
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_TIMEOUT)
        self._thread = None


def _expanded(text: str) -> str:
    return _VARIABLE.sub(lambda match: os.environ[match.group(1)], text)
