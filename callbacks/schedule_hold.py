"""Make somebody else's learning-rate schedulers stand still for one optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import MisconfigurationException

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Never(int):
    """A scheduler's frequency at which, for now, no step is a multiple of it; it keeps its number."""

    def __rmod__(self, step: int) -> int:
        return 1


class ScheduleHold:
    """Holds the schedulers that Lightning steps with the optimizer: it asks for ``step % frequency == 0``."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def hold(self, trainer: Trainer) -> None:
        """Until :meth:`release`, no scheduler is stepped."""
        self._held = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
        for config in self._held:
            config.frequency = Never(config.frequency)

    def release(self) -> None:
        """Give the schedulers back their frequency; nothing happens if none is held."""
        for config in self._held:
            config.frequency = int(config.frequency)
        self._held = []


def refuse_rare_schedulers(trainer: Trainer, who: str) -> None:
    """Raise when a scheduler steps every n-th optimizer step, or all of them by epochs: no step can be taken off."""
    configs = trainer.lr_scheduler_configs
    if configs and all(config.interval != "step" for config in configs):
        raise MisconfigurationException(
            f"lr_scheduler interval={configs[0].interval!r}: `{who}` takes single optimizer steps off the schedule, and"
            " none of the schedulers counts these; set interval to 'step', or write schedule_on_skip='advance'."
        )
    for config in configs:
        if config.interval == "step" and config.frequency != 1:
            raise MisconfigurationException(
                f"lr_scheduler frequency={config.frequency}: `{who}` takes single optimizer steps off the schedule; set"
                " the frequency to 1, or write schedule_on_skip='advance'."
            )
