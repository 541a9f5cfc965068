"""The scalars that were logged in the step that ends: none that the trainer still has from an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .private_names import last_logged
from .scalars import Scalars

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_FIRST = "on_train_batch_start."


class LoggedNow:
    """Tells what was logged in a step from what was logged before it, by the tensors that ``log`` makes.

    A value that is measured every few steps stays among the trainer's metrics, and a resume begins without it: as an
    observation of each step in between it would count or not by where a run was stopped.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what an earlier fit has logged."""
        self._before: dict[str, Tensor] | None = None  # by hook and name, when the step began
        self._at_the_end: dict[str, Tensor] = {}  # of the step before, what was logged where its batches began

    def begin_batch(self, trainer: Trainer) -> None:
        """To be called where each micro-batch of a step begins; the first counts."""
        if self._before is not None:
            return
        self._before = {key: value for key, (_, value) in last_logged(trainer).items() if not key.startswith(_FIRST)}
        self._before.update(self._at_the_end)  # another's hook may have been called ahead of ours

    def values(self, trainer: Trainer) -> dict[str, Tensor]:
        """What was logged in the step that ends, by name."""
        found = dict(next((c.of_this_step for c in trainer.callbacks if isinstance(c, Scalars)), {}))  # type: ignore[attr-defined]
        before = self._before or {}
        for key, (names, value) in last_logged(trainer).items():
            if value is not before.get(key):
                found.update(dict.fromkeys(names, value.detach()))
        return found

    def end_step(self, trainer: Trainer) -> None:
        """To be called where a step ends."""
        self._before = None
        self._at_the_end = {key: value for key, (_, value) in last_logged(trainer).items() if key.startswith(_FIRST)}
