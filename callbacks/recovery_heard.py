"""What was heard of a run and not judged yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .events import Event


class Heard:
    """Losses of steps and events of trouble, in the order in which the ladder is to judge them."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float | None]] = []  # (step, loss)
        self._events: list[Event] = []

    def note_loss(self, step: int, loss: float | None) -> None:
        """Take in the loss of a step."""
        self._rows.append((step, loss))

    def note_event(self, event: Event) -> None:
        """Take in an event."""
        self._events.append(event)

    def forget_after(self, step: int) -> None:
        """Leave out the losses of later steps, which are taken once more."""
        self._rows = [row for row in self._rows if row[0] <= step]

    def due(self, step: int) -> Iterator[tuple[int, float | None, list[Event]]]:
        """Hand out each loss of the steps up to one, with the events of up to its step."""
        while self._rows and self._rows[0][0] <= step:
            row, loss = self._rows.pop(0)
            heard = [event for event in self._events if event.step <= row]
            self._events = [event for event in self._events if event.step > row]
            yield row, loss, heard

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "rows": [list(row) for row in self._rows],
            "events": [{**asdict(event), "samples": None} for event in self._events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self._rows = [(int(step), loss) for step, loss in state["rows"]]
        self._events = [Event(**event) for event in state["events"]]
