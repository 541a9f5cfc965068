"""Validation every so many optimizer steps, samples or tokens, whatever the accumulation window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .base import MisconfigurationException, StabilityCallback, rank_zero_warn
from .cadence import Cadence, Every, parse_cadence
from .private_names import batches_that_stepped, forget_validation_first, validate_first, window_is_open
from .progress import Progress
from .step_seed import StepSeed

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

    A checkpoint says whether the validation of its step is still to be made: a fit that goes on from one that was
    written before it, or before it was finished, makes it first, on the weights of that step and logged at it, and so
    sees what a run without a stop sees. Of the last step that is so where it is the ``every``-th too and the fit is to
    go on; one that has nothing more to train ends as it does. With ``StepSeed`` a validation draws what it would have.

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
        self._owed: tuple[int, int] | None = None  # a validation due and not finished: its step, and that in the log
        self._seen = -1  # optimizer steps when it was last asked whether one is due

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
                " one of them out."
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
        steps = self._seen = Progress.of(trainer).steps
        if self._owed is None or self._owed[0] != steps:  # that of another checkpoint, which was evaluated
            self._owed = None
        elif isinstance(trainer.val_check_batch, StepCheck):
            validate_first(trainer, self._owed[1], trainer.val_check_batch.asks_for_one)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.reload_dataloaders_every_n_epochs and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._take_over(trainer)  # Lightning writes its own interval with each new loader

    def _take_over(self, trainer: Trainer) -> None:
        if trainer.enable_validation and type(trainer.val_check_batch) in (int, float, type(None)):  # nobody else's
            self._trainers_own = trainer.val_check_batch
            trainer.val_check_batch = StepCheck(self.every, trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._owed = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._ask_once(trainer)  # already: whoever saves in `on_train_batch_end` may be ahead

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._ask_once(trainer)  # a step without any loss

    def _ask_once(self, trainer: Trainer) -> None:
        progress = Progress.of(trainer)
        if progress.steps == self._seen:
            return
        self._seen = progress.steps
        is_made = trainer.enable_validation and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if is_made and self.every.is_due(progress.start, progress.mark):
            self._owed = progress.steps, batches_that_stepped(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._owed = None

    def state_dict(self) -> dict[str, Any]:
        return {"owed": None if self._owed is None else list(self._owed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        owed = state_dict.get("owed")
        self._owed = None if owed is None else (int(owed[0]), int(owed[1]))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        forget_validation_first(trainer)
        # Lightning 2.5.0 gives a trainer this attribute in its first fit, not before.
        if isinstance(getattr(trainer, "val_check_batch", None), StepCheck):
            trainer.val_check_batch = self._trainers_own


class StepCheck(int):
    """An int that, on the right side of ``%``, is zero when it is time to validate."""

    every: Cadence
    trainer: Trainer
    _is_asked_for: bool

    def __new__(cls, every: Cadence, trainer: Trainer) -> StepCheck:
        check = super().__new__(cls, every.number)
        check.every, check.trainer, check._is_asked_for = every, trainer, False
        return check

    def asks_for_one(self) -> None:
        """Be zero the next time."""
        self._is_asked_for = True

    def __rmod__(self, micro_batches: int) -> int:
        is_asked_for, self._is_asked_for = self._is_asked_for, False
        if not is_asked_for and not self._is_due():
            return 1
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StepSeed):
                callback.seed_validation(self.trainer)
        return 0

    def _is_due(self) -> bool:
        trainer = self.trainer
        if window_is_open(trainer):
            return False
        last = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        progress = Progress.of(trainer)
        return last or self.every.is_due(progress.start, progress.mark)
