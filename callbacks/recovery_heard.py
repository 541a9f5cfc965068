"""What was heard of a run and not judged yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .detectors import Detectors
from .events import Event, Events

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_NAME = "recovery"  # of the listener


class Heard:
    """Losses of steps and events of trouble, in the order in which the ladder is to judge them.

    Args:
        kinds: Of event that are trouble.
    """

    def __init__(self, kinds: Collection[str]) -> None:
        self._kinds = kinds
        self._rows: list[tuple[int, float]] = []  # (step, loss)
        self._events: list[Event] = []

    def listen(self, trainer: Trainer, answers: bool) -> None:
        """Hear of events, and of losses from `Detectors`; ``answers``: whether trouble is acted upon."""
        events = Events.of(trainer)
        events.listeners[_NAME] = self.note_event
        events.answered |= set(self._kinds if answers else ())
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Detectors):
                callback.listeners[_NAME] = self.note_values

    def stop_listening(self, trainer: Trainer, answers: bool) -> None:
        """Undo it."""
        events = Events.of(trainer)
        events.listeners.pop(_NAME, None)
        events.answered -= set(self._kinds if answers else ())
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Detectors):
                callback.listeners.pop(_NAME, None)

    def note_values(self, step: int, values: Mapping[str, float]) -> None:
        """Take in the loss of a step, if it had one."""
        if "loss" in values:
            self._rows.append((step, values["loss"]))

    def note_event(self, event: Event) -> None:
        """Take in an event, if it is trouble of which every rank knows."""
        if event.rank is None and event.kind in self._kinds:
            self._events.append(event)

    def forget_after(self, step: int) -> None:
        """Leave out the losses of later steps, which are taken once more."""
        self._rows = [row for row in self._rows if row[0] <= step]

    def due(self, step: int) -> Iterator[tuple[int, float, list[Event]]]:
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
            "events": [asdict(event) for event in self._events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore."""
        self._rows = [(int(step), loss) for step, loss in state["rows"]]
        self._events = [Event(**event) for event in state["events"]]
