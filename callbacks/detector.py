"""What a detector is: it reads one run's scalars, step by step, and says when something begins to go wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from .base import refuse_all
from .events import Event


class Detector(ABC):
    """Streaming, plain Python, with plain state: the same online, on every rank, and over the log of a finished run.

    A detector never lets what is not finite into its statistics. One excursion is one event.
    """

    kind: ClassVar[str]
    #: Names of attributes that are the detector's memory: plain values, what has a state of its own, dicts of these.
    memory: ClassVar[tuple[str, ...]]

    @abstractmethod
    def observe(self, step: int, values: Mapping[str, float]) -> list[Event]:
        """Take in the scalars of one step by name and return what begins there.

        Scalars that the detector does not know, or that lack, are passed over.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {name: _plain(getattr(self, name)) for name in self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; what the state lacks begins anew."""
        for name in self.memory:
            if name in state:
                setattr(self, name, _restored(getattr(self, name), state[name]))


def _plain(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _restored(own: Any, saved: Any) -> Any:
    if hasattr(own, "load_state_dict"):
        own.load_state_dict(saved)
        return own
    if isinstance(own, dict) and any(hasattr(one, "load_state_dict") for one in own.values()):
        return {key: _restored(one, saved[key]) if key in saved else one for key, one in own.items()}
    return _plain(saved)


def require(detector: Detector, **rules: tuple[bool, str]) -> None:
    """Refuse the options that do not hold to their rules; by name: whether it holds, and the rule."""
    refuse_all(
        f"`{type(detector).__name__}({name}={getattr(detector, name)!r})`: must be {rule}."
        for name, (holds, rule) in rules.items()
        if not holds
    )
