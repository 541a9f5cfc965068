"""Exact gradient-accumulation windows: every optimizer step sees the batch it was meant to see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from .base import (
    MisconfigurationException,
    StabilityCallback,
    is_logging_step,
    log_number,
    refuse_all,
    refuse_manual_optimization,
)
from .device_step import local_gradients
from .even_epochs import (
    end_with_the_first_that_runs_dry,
    end_with_the_shortest,
    judge_the_interval_later,
    refuse_a_rank_without_data,
    refuse_an_empty_epoch,
    restore_the_interval,
)
from .private_names import align_logged_step, ready_batches
from .progress import Progress
from .token_weights import TokenWeights
from .topology import data_parallel_size
from .whole_gradients import warn_of_whole_gradients

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: What one optimizer step is the mean over.
AverageOver = Literal["micro_batches", "tokens"]


class Window(int):
    """A number of micro-batches that starts at an offset.

    Lightning steps when ``ready_batches % accumulate_grad_batches == 0`` and divides the loss by the same number. As
    an int it divides by its size; as the right side of ``%`` it counts from the offset. It stands on the Trainer from
    ``setup`` on, so that ``trainer.estimated_stepping_batches`` counts optimizer steps.
    """

    offset: int

    def __new__(cls, size: int, offset: int = 0) -> Window:
        window = super().__new__(cls, size)
        window.offset = offset
        return window

    def __rmod__(self, ready: int) -> int:
        return (ready - self.offset) % int(self)


class AccumulationWindows(StabilityCallback):
    """Turn a global batch into micro-batches, with whole windows after any resume.

    The global batch is what one optimizer step averages over: ``global_batch`` samples over all data-parallel ranks.
    The number of micro-batches per window is ``global_batch / (micro_batch * ranks)``, so the same recipe runs on any
    number of ranks. A window that was open when a checkpoint was written is replayed whole; the last window of a
    finite epoch holds what is left, and its weights sum to one, also where the loader has no length. A learning-rate
    schedule may take its horizon from ``trainer.estimated_stepping_batches``. Where the loaders of the ranks have
    different lengths, an epoch ends with the shortest on every rank, which is said: a rank that goes on alone waits for
    the others for ever. Of loaders without a length the hosts ask each other at every micro-batch whether one has run
    dry, unless ``alike_on_ranks`` says that none does alone (see ``Progress``).

    With ``average_over="tokens"`` a step is the mean over the counted tokens of the whole window and all data-parallel
    ranks, as if it were one batch, where padding or masks leave micro-batches with different numbers of them; otherwise
    each micro-batch's mean weighs the same. The loss of ``training_step`` must be the mean over the micro-batch's
    counted tokens: those of ``batch["labels"]`` that are not -100, or as many as the LightningModule's
    ``count_targets(batch) -> Tensor`` says (0-d, on the device; of a model that shifts labels by itself, write
    ``(batch["labels"][:, 1:] != -100).sum()``). A micro-batch without counted tokens must have a loss whose gradient is
    finite, as torch's cross entropy has, and weighs nothing; a window without any has gradients of zero. Of the losses
    that callbacks see before the backward pass each is multiplied by its weight. Costs one pass over the gradients, and
    one sum over ranks, per step; the host waits for neither.

    A window of several micro-batches under Lightning's own ``FSDPStrategy`` is warned of, once a fit: until the last of
    them that one keeps whole gradients on every rank.

    Logged: ``progress/micro_batches`` (per optimizer step, at logging steps), ``progress/counted_tokens`` (likewise,
    over all ranks; with ``average_over="tokens"`` alone).

    Args:
        global_batch: Samples per optimizer step, over all ranks.
        micro_batch: Samples per rank and forward pass.
        average_over: ``micro_batches`` or ``tokens``.

    Raises:
        MisconfigurationException: when the global batch is no multiple of ``micro_batch * ranks`` (the nearest legal
            sizes are named), when ``Trainer(accumulate_grad_batches=...)`` or a scheduler callback sets the window as
            well, under manual optimization, when the loader hands out batches of another size, when an epoch, the
            first or a later one, over loaders without a length has no batch on some rank, when
            ``Trainer(val_check_interval=N)`` is above the length of the shortest loader of several ranks, or when
            tokens are to be counted and neither the batch nor the LightningModule says how.

    Example::

        >>> Trainer(callbacks=[AccumulationWindows(global_batch=32, micro_batch=8)])  # doctest: +SKIP
    """

    order: ClassVar[int] = 10
    #: Whether a batch that is too small is refused wherever a window begins with it, or in the first window of a fit.
    strict: ClassVar[bool] = False

    def __init__(self, global_batch: int, micro_batch: int, average_over: AverageOver = "micro_batches") -> None:
        refuse_all(
            f"`{type(self).__name__}({name}={value})`: must be at least 1."
            for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch))
            if value < 1
        )
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.average_over: AverageOver = average_over
        self.token_weights = TokenWeights() if average_over == "tokens" else None
        self._opened_at = -1
        self._has_checked = False
        self._has_warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        Progress.of(trainer)
        self._refuse_other_windows(trainer, pl_module)
        step = self.micro_batch * data_parallel_size(trainer)
        if self.global_batch % step:
            below = self.global_batch // step * step
            legal = " and ".join(str(n) for n in (below, below + step) if n)
            raise MisconfigurationException(
                f"global_batch={self.global_batch}: must be a multiple of micro_batch x data-parallel ranks ="
                f" {self.micro_batch} x {step // self.micro_batch} = {step}; the nearest legal sizes are {legal}."
            )
        judge_the_interval_later(trainer)
        trainer.accumulate_grad_batches = self._first_window(trainer)

    @staticmethod
    def _refuse_other_windows(trainer: Trainer, pl_module: LightningModule) -> None:
        accumulate = trainer.accumulate_grad_batches
        if not isinstance(accumulate, Window) and accumulate != 1:  # a second fit after one that failed finds a Window
            raise MisconfigurationException(
                f"`Trainer(accumulate_grad_batches={accumulate})`: the window follows from global_batch already; delete"
                " it."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "get_accumulate_grad_batches"):
                raise MisconfigurationException(
                    f"`{type(callback).__name__}`: sets the accumulation window, which follows from global_batch"
                    " already; delete it, or take `BatchSizeWarmup` for a batch that grows."
                )
        refuse_manual_optimization(
            pl_module,
            "takes its steps itself, so no callback can set its accumulation window; accumulate in training_step, or"
            " use automatic optimization.",
        )

    def _first_window(self, trainer: Trainer) -> Window:
        """What stands for the window before the run has begun."""
        return Window(self.window_size(trainer))

    def window_size(self, trainer: Trainer) -> int:
        """Micro-batches in the window that opens now."""
        return self.global_batch // (self.micro_batch * data_parallel_size(trainer))

    def handed_out(self, trainer: Trainer) -> int:
        """Samples per rank that the loader is to hand out at once in the window that opens now."""
        return self.micro_batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end_with_the_shortest(trainer)
        refuse_a_rank_without_data(trainer, Progress.of(trainer).ranks)
        if self.token_weights is not None:
            self.token_weights = TokenWeights()  # what an earlier fit counted may have had another size
        self._open(trainer, offset=ready_batches(trainer))
        self._opened_at = -1  # Lightning resets that count before the first batch: open again there

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        progress = Progress.of(trainer)
        end_with_the_first_that_runs_dry(trainer, progress.ranks)
        if progress.steps != self._opened_at:
            self._open(trainer, offset=batch_idx)
            self._refuse_another_size(trainer)
        if self.token_weights is not None:
            self.token_weights.begin_batch(trainer, pl_module, batch)
        align_logged_step(trainer)

    def _refuse_another_size(self, trainer: Trainer) -> None:
        expected = self.handed_out(trainer)
        found = Progress.of(trainer).pending_samples // data_parallel_size(trainer)
        too_small = found < expected and not trainer.is_last_batch and (self.strict or not self._has_checked)
        if found > expected or too_small:
            raise MisconfigurationException(
                f"batch of {found} samples: `{type(self).__name__}` expects {expected} per rank here"
                f" (micro_batch={self.micro_batch}); let the loader hand out those."
            )
        self._has_checked = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._opened_at = -1  # the epoch before may have been cut short within a window
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            end_with_the_shortest(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_an_empty_epoch(trainer, Progress.of(trainer).ranks)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self.token_weights is not None:
            self.token_weights.weigh(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        held, counted = self._held(trainer), None
        if self.token_weights is not None:
            counted = self.token_weights.settle(trainer, optimizer)
        elif held < trainer.accumulate_grad_batches and pl_module.automatic_optimization:
            scale_gradients(optimizer, trainer.accumulate_grad_batches / held)
        if is_logging_step(trainer):
            log_number(pl_module, "progress/micro_batches", held)
            if counted is not None:
                pl_module.log("progress/counted_tokens", counted)

    @staticmethod
    def _held(trainer: Trainer) -> int:
        """Micro-batches that the window has held; fewer than it was opened for when a loader without length ran dry."""
        window = trainer.accumulate_grad_batches
        assert isinstance(window, Window)
        return min(window, ready_batches(trainer) - window.offset)

    def _open(self, trainer: Trainer, offset: int) -> None:
        size = self.window_size(trainer)
        if trainer.num_training_batches != float("inf"):
            size = max(1, min(size, int(trainer.num_training_batches) - offset))
        trainer.accumulate_grad_batches = Window(size, offset)
        if size > 1 and not self._has_warned:
            self._has_warned = True
            warn_of_whole_gradients(trainer)
        if self.token_weights is not None:
            self.token_weights.open_window()
        self._opened_at = Progress.of(trainer).steps

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.accumulate_grad_batches, Window):
            trainer.accumulate_grad_batches = 1
        restore_the_interval(trainer)
        self._opened_at, self._has_checked, self._has_warned = -1, False, False


def scale_gradients(optimizer: Any, factor: float) -> None:
    """Multiply all gradients of an optimizer in place."""
    if local := local_gradients(optimizer):
        torch._foreach_mul_(local, factor)
