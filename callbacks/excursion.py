"""When a series is outside of where it should be: told once, however long it stays there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QUIET = 5  # steps inside that end an excursion


class Excursion:
    """Which of the last steps were outside, and whether that was told.

    A value far outside is told at once, a nearer one when it is the second within three steps: lone outliers of a
    heavy-tailed but healthy run are left alone. Five steps inside in a row end an excursion.

    Args:
        adapt: Steps outside in a row after which they are the new normal.
    """

    def __init__(self, adapt: int) -> None:
        self._adapt = adapt
        self._outside: list[bool] = []  # of the last steps, oldest first
        self._told = False

    def begins(self, outside: bool, far: bool) -> bool:
        """Take in a step; whether an excursion is to be told of here."""
        self._outside = [*self._outside, outside][-max(self._adapt, _QUIET) :]
        if not any(self._outside[-_QUIET:]):
            self._told = False
        if self._told or not outside or not (far or sum(self._outside[-3:]) > 1):
            return False
        self._told = True
        return True

    @property
    def is_new_normal(self) -> bool:
        """Whether the last ``adapt`` steps were all outside."""
        return len(self._outside) >= self._adapt and all(self._outside[-self._adapt :])

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {"outside": list(self._outside), "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore."""
        self._outside, self._told = [bool(one) for one in state["outside"]], bool(state["told"])
