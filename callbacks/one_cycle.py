"""One-cycle schedules that may be trained past."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import OneCycleLR

from .scheduler_settings import schedulers

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class EndingOneCycleLR(OneCycleLR):
    """A one-cycle schedule that stays where its cycle ended, where torch's raises."""

    def get_lr(self) -> list[Any]:
        if self.last_epoch < self.total_steps:
            return super().get_lr()
        return [group["min_lr"] for group in self.optimizer.param_groups]


def let_cycles_end(trainer: Trainer) -> list[Any]:
    """Turn every ``OneCycleLR`` into :class:`EndingOneCycleLR`, in place; returns them for :func:`undo`.

    The class is swapped, since a method put on the instance would be saved with the scheduler's state.
    """
    changed = [scheduler for _, scheduler in schedulers(trainer) if type(scheduler) is OneCycleLR]
    for scheduler in changed:
        scheduler.__class__ = EndingOneCycleLR
    return changed


def undo(changed: list[Any]) -> None:
    """Undo :func:`let_cycles_end`."""
    for scheduler in changed:
        scheduler.__class__ = OneCycleLR
