"""What every callback of this package shares: both Lightning namespaces, and one fixed order among ours."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.callbacks import Callback
except ImportError:  # a project that has the stand-alone packages only
    from lightning_fabric.utilities.exceptions import MisconfigurationException  # type: ignore[assignment]
    from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]

from .argument_types import judges_arguments
from .private_names import batches_that_stepped

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
else:
    # A Trainer of either namespace runs our callbacks by their hooks, but a LightningCLI takes them from YAML by class
    # alone. So a project that has imported the other namespace finds its class among our bases as well.
    _other = getattr(sys.modules.get("pytorch_lightning"), "Callback", Callback)
    if _other is not Callback:
        Callback = type("Callback", (Callback, _other), {"__module__": __name__})

__all__ = [
    "Callback",
    "MisconfigurationException",
    "StabilityCallback",
    "find_or_install",
    "is_logging_step",
    "log_number",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "refuse_all",
    "refuse_manual_optimization",
]

_Callback = TypeVar("_Callback", bound="StabilityCallback")


class StabilityCallback(Callback):
    """Base of the package's callbacks: keeps them in one fixed order whatever the user's list order.

    Within a hook, Lightning calls callbacks in list order, and order matters: a gradient that is dropped must be gone
    before the norm is taken, the norm must exist before it is judged, and so on. ``setup`` re-sorts ours within the
    places they hold, so that foreign callbacks stay where the user put them. One callback given twice is refused.

    An argument that is not what its annotation says is refused with a sentence. A subclass that overrides ``setup``
    calls ``super().setup(...)`` first. ``teardown`` undoes what was touched, after an exception too, and may be called
    twice.
    """

    #: Position among ours: counters < seeds < windows < freezing < norm < skip < clip < monitors < saving.
    order: ClassVar[int] = 50
    #: The ``state`` of the trainer that it has trained with last, which tells trainers apart; see ``Progress``.
    served: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            # Somebody else's `__init__` may open files and start threads, so it is called once.
            is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
            judges_arguments(MisconfigurationException, asks_again=is_ours)(cls)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning calls no teardown after an exception, and what was touched must not outlive the fit.
        for clean_up in (
            functools.partial(self.handle_exception, trainer, pl_module, exception),
            functools.partial(self.teardown, trainer, pl_module, "fit"),
        ):
            try:
                clean_up()
            except Exception as second:
                self.warn_of_second(exception, second)

    def warn_of_second(self, first: BaseException, second: Exception) -> None:
        """Warn of an exception after the one that ended the fit."""
        # Raised, it would replace the first exception, and the callbacks after this one would not be called.
        warnings.warn(f"{type(self).__name__}, after {type(first).__name__}: {second}", stacklevel=1)

    def handle_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Override to report what is still unreported when a fit has failed; ``teardown`` follows.

        The device may be gone. An exception raised here or in ``teardown`` becomes a warning, so that the first one is
        the one that the user sees.
        """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        refuse_twins(trainer, self)
        arrange(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:  # an epoch that was cut short leaves a window that never steps
            self.drop_window()

    def drop_window(self) -> None:
        """Override to forget what was added up in an accumulation window whose gradients are in no step."""


def refuse_all(problems: Iterable[str]) -> None:
    """Raise with every problem on a line of its own, where there is any."""
    if lines := list(problems):
        raise MisconfigurationException("\n".join(lines))


def refuse_manual_optimization(module: LightningModule, why: str) -> None:
    """Raise where a module takes its optimizer steps itself; ``why`` ends the sentence, and has the remedy."""
    if not module.automatic_optimization:
        raise MisconfigurationException(f"`{type(module).__name__}.automatic_optimization=False`: {why}")


def refuse_twins(trainer: Trainer, ours: StabilityCallback) -> None:
    """Raise when the trainer's callbacks hold another of the same class, or one that is saved under the same name."""
    named_alike = [c for c in trainer.callbacks if c is not ours and c.state_key == ours.state_key]  # type: ignore[attr-defined]
    twins = [c for c in named_alike if type(c) is type(ours)]
    if twins:
        raise MisconfigurationException(
            f"`{type(ours).__name__}`: stands {len(twins) + 1} times in the trainer's callbacks and would act as often;"
            " keep one."
        )
    strangers = [type(c) for c in named_alike if _keeps_state(c) and _keeps_state(ours)]
    if strangers:
        raise MisconfigurationException(
            f"`{strangers[0].__module__}.{strangers[0].__name__}`: a checkpoint could hold its state or that of"
            f" `{type(ours).__module__}.{type(ours).__name__}`, not both, since their state_key {ours.state_key!r} is"
            " the same; rename the class, or give it a `state_key` of its own."
        )


def _keeps_state(callback: Any) -> bool:
    # By name: the base class is another object in each of Lightning's namespaces.
    return str(type(callback).state_dict.__qualname__) != "Callback.state_dict"


def arrange(trainer: Trainer) -> None:
    """Sort our callbacks within their own slots of ``trainer.callbacks``.

    The list is rebound, never changed in place: Lightning iterates the old one while hooks run.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    ours = iter(sorted((c for c in callbacks if isinstance(c, StabilityCallback)), key=lambda c: c.order))
    trainer.callbacks = [next(ours) if isinstance(c, StabilityCallback) else c for c in callbacks]  # type: ignore[attr-defined]


def install(trainer: Trainer, callback: StabilityCallback) -> None:
    """Add a callback that another one needs, at the front, and put ours in order."""
    refuse_twins(trainer, callback)
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
    """Whether what is logged in the optimizer step now under way reaches the loggers: by Lightning's own count.

    The same in `on_train_batch_end` of the step, whose batch is not counted yet.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (batches_that_stepped(trainer) + 1) % every == 0


def log_number(module: LightningModule, name: str, value: float | Tensor) -> None:
    """Log a number that the host knows, in fp32; as a ``float`` Lightning would copy it to the device, and wait."""
    module.log(name, value if isinstance(value, Tensor) else torch.tensor(float(value)))
