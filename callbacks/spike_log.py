"""The host's side of a spike detector: events as they come in, and on which step to act on them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .event_ring import EventRing
from .events import Event
from .progress import Mark
from .spike_events import SpikeEvent, event

MAX_EVENTS = 1000


class SpikeLog:
    """Reads rows from the device a fixed number of steps late, and keeps what is to be told and still to be done.

    Both a schedule's hold and a stop fall on the step of the spike plus the ring's lag, also when the row was read
    before, for a save: what is done when does not depend on who looked.

    Args:
        signals: What is judged, in the detector's order.
        loud: Spikes in consecutive steps that are told; a run that is only watched may be past saving.
        acts: False: say what would have been done, and have nothing done.
        holds: Whether the schedule is held over a skipped step.
    """

    def __init__(self, signals: list[str], loud: int, acts: bool, holds: bool) -> None:
        self._signals, self._loud, self._acts, self._holds = signals, loud, acts, holds
        self.events: list[SpikeEvent] = []
        self._ring = EventRing()
        self._in_row = 0  # events in consecutive steps
        self._due: list[list[int]] = []  # [step at which to hold the schedule; steps, samples, tokens to hold it over]
        self._stop_at: int | None = None

    def push(self, step: int, window: Mark, samples: tuple[int, int], row: Tensor) -> None:
        """Send the row of a step on its way to the host.

        ``window``: what the step consumed; ``samples``: its first stream position, and the one after its last.
        """
        self._ring.push((step, *window, *samples), row)

    def read(self, step: int) -> list[Event]:
        """Take in every row that is due at a step; returns what is to be told."""
        return self._learn(self._ring.take(step))

    def flush(self) -> list[Event]:
        """Take in all that is on its way; returns what is to be told. Waits for the device."""
        return self._learn(self._ring.flush())

    def _learn(self, rows: list[tuple[tuple[int, ...], list[float]]]) -> list[Event]:
        told = []
        for (step, *window, first, end), numbers in rows:
            found = event(step, numbers, self._signals)
            if found is None:
                self._in_row = 0
                continue
            self._in_row += 1
            self.events = [*self.events, found][-MAX_EVENTS:]
            if self._in_row <= self._loud:
                told.append(found.told(self._acts, (first, end)))
            if self._acts and self._holds and found.skipped:
                self._due.append([step + self._ring.lag, *window])
            if self._acts and found.stop and self._stop_at is None:
                self._stop_at = step + self._ring.lag
        return told

    def hold_at(self, step: int) -> Mark | None:
        """The window over which the schedule is to be held at this step, once."""
        return Mark(*self._due.pop(0)[1:]) if self._due and self._due[0][0] <= step else None

    def stops_at(self, step: int) -> bool:
        """Whether the run is to end after this step, once: a fit that goes on from here is judged anew."""
        if self._stop_at is None or step < self._stop_at:
            return False
        self._stop_at = None
        return True

    def end_row(self) -> None:
        """Count events in consecutive steps from here on."""
        self._in_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain lists; a flush comes first."""
        return {"events": [list(e) for e in self.events], "due": [list(d) for d in self._due], "in_row": self._in_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore. A stop is not restored: who resumes has decided to go on, and the detector knows of the row."""
        self.events = [SpikeEvent(*e) for e in state["events"]]
        self._due = [list(d) for d in state["due"]] if self._acts else []
        self._in_row = int(state["in_row"])
        self._ring, self._stop_at = EventRing(), None
