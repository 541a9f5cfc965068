"""Validation every so many optimizer steps, samples or tokens, whatever the accumulation window."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .base import MisconfigurationException, StabilityCallback, rank_zero_warn
from .cadence import Cadence, Every, parse_cadence
from .private_names import window_is_open
from .progress import Progress

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class ValidateEverySteps(StabilityCallback):
    """Validate after every ``every``-th optimizer step, or so many samples or tokens, and after the last step.

    Lightning counts micro-batches, so a batch-size ramp would change when it validates, and a resume in mid-window
    would shift it. This is a function of ``Progress`` alone, and asked at the end of a window: in samples or tokens the
    step that comes to a multiple, or over it, is validated after, however large a ramp has made its batch. Several
    optimizers that step on one batch take one step together. Give the Trainer ``check_val_every_n_epoch=None``
    (Lightning then looks at every micro-batch). A run that is told to stop by ``trainer.should_stop`` validates first,
    as Lightning has it; ``GracefulStop`` does without. Where there is nothing to validate with, that is said;
    ``fast_dev_run`` validates as it does. Nothing is logged.

    Args:
        every: Optimizer steps between validations, >= 1; or text with a unit, as ``2M tokens`` or ``10_000 samples``.

    Raises:
        MisconfigurationException: when ``every`` cannot be read or is below 1, or the Trainer validates by epochs or
            by the clock.

    Example::

        >>> Trainer(callbacks=[ValidateEverySteps(100)], check_val_every_n_epoch=None)  # doctest: +SKIP
    """

    order: ClassVar[int] = 60

    def __init__(self, every: Every = 1000) -> None:
        try:
            self.every = parse_cadence(every)
        except ValueError as error:
            raise MisconfigurationException(f"`ValidateEverySteps(every={every})`: {error}") from None
        self._trainers_own: int | float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        Progress.of(trainer)
        if trainer.check_val_every_n_epoch is not None:
            raise MisconfigurationException(
                f"`Trainer(check_val_every_n_epoch={trainer.check_val_every_n_epoch})`: `ValidateEverySteps` counts"
                " optimizer steps; set check_val_every_n_epoch to None (YAML: null)."
            )
        if not hasattr(trainer, "val_check_interval"):  # Lightning has none where it goes by the clock, and looks there
            raise MisconfigurationException(
                "`Trainer(val_check_interval=...)`: is a time, and `ValidateEverySteps` counts optimizer steps; leave"
                " one of them away."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not trainer.enable_validation and trainer.limit_val_batches:
            rank_zero_warn(
                f"`ValidateEverySteps(every={self.every})`: there is nothing to validate with; give trainer.fit"
                " `val_dataloaders` and the LightningModule a `validation_step`."
            )
        self._take_over(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.reload_dataloaders_every_n_epochs and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._take_over(trainer)  # Lightning writes its own interval with each new loader

    def _take_over(self, trainer: Trainer) -> None:
        if trainer.enable_validation and type(trainer.val_check_batch) in (int, float, type(None)):  # nobody else's
            self._trainers_own = trainer.val_check_batch
            trainer.val_check_batch = StepCheck(self.every, trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning 2.5.0 gives a trainer this attribute in its first fit, not before.
        if isinstance(getattr(trainer, "val_check_batch", None), StepCheck):
            trainer.val_check_batch = self._trainers_own


class StepCheck(int):
    """An int that, on the right side of ``%``, is zero when it is time to validate."""

    every: Cadence
    trainer: Trainer

    def __new__(cls, every: Cadence, trainer: Trainer) -> StepCheck:
        check = super().__new__(cls, every.number)
        check.every, check.trainer = every, trainer
        return check

    def __rmod__(self, micro_batches: int) -> int:
        trainer = self.trainer
        if window_is_open(trainer):
            return 1
        last = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        progress = Progress.of(trainer)
        return 0 if last or self.every.is_due(progress.start, progress.mark) else 1
