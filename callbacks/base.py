"""What every callback of this package shares: both Lightning namespaces, and one fixed order among ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.callbacks import Callback
except ImportError:  # a project that has the stand-alone packages only
    from lightning_fabric.utilities.exceptions import MisconfigurationException  # type: ignore[assignment]
    from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = [
    "Callback",
    "MisconfigurationException",
    "StabilityCallback",
    "find_or_install",
    "is_logging_step",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "was_logging_step",
]

_Callback = TypeVar("_Callback", bound="StabilityCallback")


class StabilityCallback(Callback):
    """Base of the package's callbacks: keeps them in one fixed order whatever the user's list order.

    Within a hook, Lightning calls callbacks in list order, and order matters: a gradient that is dropped must be gone
    before the norm is taken, the norm must exist before it is judged, and so on. ``setup`` re-sorts ours within the
    places they hold, so that foreign callbacks stay where the user put them. One callback given twice is refused.

    A subclass that overrides ``setup`` calls ``super().setup(...)`` first. ``teardown`` undoes what was touched, after
    an exception too, and may be called twice.
    """

    #: Position among ours: counters < seeds < windows < freezing < norm < skip < clip < monitors < saving.
    order: ClassVar[int] = 50

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning calls no teardown after an exception; what was touched must not outlive the fit for that.
        self.teardown(trainer, pl_module, "fit")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        twins = [c for c in trainer.callbacks if type(c) is type(self) and c.state_key == self.state_key]  # type: ignore[attr-defined]
        if len(twins) > 1:
            raise MisconfigurationException(
                f"`{type(self).__name__}`: stands {len(twins)} times in the trainer's callbacks and would act as often;"
                " keep one."
            )
        arrange(trainer)


def arrange(trainer: Trainer) -> None:
    """Sort our callbacks within their own slots of ``trainer.callbacks``.

    The list is rebound, never changed in place: Lightning iterates the old one while hooks run.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    ours = iter(sorted((c for c in callbacks if isinstance(c, StabilityCallback)), key=lambda c: c.order))
    trainer.callbacks = [next(ours) if isinstance(c, StabilityCallback) else c for c in callbacks]  # type: ignore[attr-defined]


def install(trainer: Trainer, callback: StabilityCallback) -> None:
    """Add a callback that another one needs, at the front, and put ours in order."""
    trainer.callbacks = [callback, *trainer.callbacks]  # type: ignore[attr-defined]
    arrange(trainer)


def find_or_install(trainer: Trainer, cls: type[_Callback]) -> _Callback:
    """The trainer's callback of a class that needs no arguments, installed if it has none yet."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, cls):
            return callback
    callback = cls()
    install(trainer, callback)
    return callback


def is_logging_step(trainer: Trainer) -> bool:
    """Whether what is logged in the optimizer step now under way reaches the loggers."""
    return _is_multiple(trainer, trainer.global_step + 1)


def was_logging_step(trainer: Trainer) -> bool:
    """The same of the optimizer step that has just been taken, as `on_train_batch_end` finds it."""
    return _is_multiple(trainer, trainer.global_step)


def _is_multiple(trainer: Trainer, step: int) -> bool:
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0
