"""Sequence-length warm-up: train on short sequences first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .base import (
    MisconfigurationException,
    StabilityCallback,
    is_logging_step,
    log_number,
    rank_zero_info,
    rank_zero_warn,
)
from .batch_size_warmup import BatchSizeWarmup
from .batch_tensors import batch_shape
from .length_schedule import SHAPES, LengthSchedule, LengthStages
from .private_names import compiled_graphs
from .progress import Progress
from .shorter_batch import melt, truncate

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# Three lengths in a row that each cost a compilation: the shapes are static, and torch gives up after eight.
_RECOMPILED_IN_A_ROW = 3


class SequenceLengthWarmup(StabilityCallback):
    """Shorten the sequences of each training batch to a length that grows with the optimizer steps.

    Short sequences first keep the variance of early gradients down, where large batches and rates diverge. The length
    of a step is a function of its number (from 1, as in DeepSpeed): a resume needs no state, and all micro-batches of
    a window have one length.

    The batch may be a tensor, tuple, list or dict, nested at will. Its first tensor with two or more dimensions says
    what (B, T) is; every tensor of shape (B, T, ...) is shortened along T. Batches shorter than the length stay as
    they are. Where inputs and labels are cut from one (B, T + 1) tensor in the module, lengths count that tensor.

    - ``truncate``: the first L positions are trained on, the tail is dropped. Samples per step stay, tokens per step
      grow.
    - ``melt``: a row becomes T // L rows of L positions; only the last T % L are dropped. Tensors of shape (B, ...)
      have their rows repeated. Samples are still counted as the loader's, so position, windows and seeds are the same.

    ``Progress`` counts the tokens that are left, exactly. The batch is shortened as it reaches its device, before any
    hook or the module sees it. Validation and test sequences keep their full length, so the training loss, which is
    at the current length, is not comparable to theirs: watch the length beside the loss.

    Each length is a new shape for ``torch.compile``, which by default compiles twice and is then ready for any length.
    Compiled with ``dynamic=False`` it would start afresh for each and give up, silently, after eight: three lengths in
    a row that cost a compilation are warned about, with the number of lengths to come.

    Logged at logging steps: ``stability/sequence_length`` (positions per row in this step; under ``action="log"`` what
    they would have been).

    Args:
        shape: ``linear``, ``root`` (square root of the elapsed part), or stages: ``"64 for 1000 steps then 2048"``.
        min_length: Length of the first step, a multiple of ``multiple_of``; not with stages.
        total_steps: Optimizer step from which on sequences have their full length; not with stages.
        max_length: The full length; ``None``: the data module's attribute ``sequence_length``.
        multiple_of: Lengths before the last are rounded down to multiples of it; tensor cores like 8.
        mode: ``truncate`` or ``melt``.
        allow_both: Together with ``BatchSizeWarmup``, which does the same job on the other axis.
        action: ``log``: shorten nothing.

    Raises:
        MisconfigurationException: when the numbers make no schedule, when the full length is given nowhere or differs
            from the data module's, beside ``BatchSizeWarmup`` without ``allow_both``, when a batch has no (B, T)
            tensor or is longer than ``max_length``.

    Example::

        >>> warmup = SequenceLengthWarmup("linear", min_length=64, total_steps=36_000, max_length=2048)
        >>> warmup.length(146)
        72

    Source: Li et al. 2022, arXiv:2108.06084 (truncation, linear pacing); DeepSpeed's curriculum learning.
    """

    order: ClassVar[int] = 7

    def __init__(
        self,
        shape: str = "linear",
        min_length: int | None = None,
        total_steps: int | None = None,
        max_length: int | None = None,
        multiple_of: int = 8,
        mode: Literal["truncate", "melt"] = "truncate",
        allow_both: bool = False,
        action: Literal["act", "log"] = "act",
    ) -> None:
        self.shape = shape
        self.min_length = min_length
        self.total_steps = total_steps
        self.max_length = max_length
        self.multiple_of = multiple_of
        self.mode = mode
        self.allow_both = allow_both
        self.action = action
        self._given = max_length
        self._lengths: LengthSchedule | LengthStages | None = None
        self._restore: Callable[[], None] = _nothing
        self._last = 0  # length of the last batch, and how many lengths in a row cost a compilation
        self._graphs = self._recompiled = 0
        if max_length is not None:
            self._lay_out(max_length)

    # -- the schedule ------------------------------------------------------------------------------------------------

    def adopt(self, data: Any) -> None:
        """Take the full length, if it was not given, from a data module's ``sequence_length``."""
        theirs = getattr(data, "sequence_length", None)
        if self._given is not None and theirs is not None and self._given != theirs:
            raise MisconfigurationException(
                f"`SequenceLengthWarmup(max_length={self._given})`: the data module has sequence_length={theirs}; leave"
                " max_length out."
            )
        longest = self._given if self._given is not None else theirs
        if longest is None:
            where = "there is no data module" if data is None else "the data module has no attribute sequence_length"
            raise MisconfigurationException(
                f"`SequenceLengthWarmup(max_length=None)`: {where} to take it from; write"
                f" `SequenceLengthWarmup({self.shape!r}, ..., max_length=...)`."
            )
        self._lay_out(longest)

    def _lay_out(self, longest: int) -> None:
        self.max_length = longest
        try:
            if self.shape in SHAPES:
                if self.min_length is None or self.total_steps is None:
                    raise ValueError(f"shape {self.shape} needs min_length and total_steps.")
                self._lengths = LengthSchedule(self.shape, self.min_length, longest, self.total_steps, self.multiple_of)
            else:
                if self.min_length is not None or self.total_steps is not None:
                    raise ValueError("stages name their lengths and steps; leave min_length and total_steps out.")
                self._lengths = LengthStages(self.shape, longest)
        except ValueError as error:
            raise MisconfigurationException(f"`SequenceLengthWarmup(shape={self.shape!r})`: {error}") from None

    @property
    def lengths(self) -> LengthSchedule | LengthStages:
        """The schedule; its ``distinct()`` are the shapes that the module will see."""
        assert self._lengths is not None, "setup or adopt comes first"
        return self._lengths

    def length(self, step: int) -> int:
        """Positions per row that optimizer step ``step``, counted from 1, is trained on."""
        return self.lengths.longest if self.action == "log" else self.lengths.at(step)

    def tokens_in(self, samples: int, step: int) -> int:
        """Tokens of a step of so many samples."""
        length = self.length(step)
        pieces = self.lengths.longest // length if self.mode == "melt" else 1
        return samples * pieces * length

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.adopt(trainer.datamodule)  # type: ignore[attr-defined]
        ramp = any(isinstance(c, BatchSizeWarmup) for c in trainer.callbacks)  # type: ignore[attr-defined]
        if ramp and not self.allow_both:
            raise MisconfigurationException(
                "`SequenceLengthWarmup` and `BatchSizeWarmup`: both make early steps small, and one replaces the"
                " other; delete one, or set allow_both if you mean it."
            )
        Progress.of(trainer)
        self._restore()  # of a fit that failed
        if self.action == "act":
            self._shadow(trainer)

    def _shadow(self, trainer: Trainer) -> None:
        """Shorten what the strategy hands to the training loop: no hook can replace a batch that is a tensor."""
        strategy, progress = trainer.strategy, Progress.of(trainer)
        to_device = strategy.batch_to_device

        def to_device_then_shorten(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = to_device(batch, *args, **kwargs)
            return self._shortened(trainer, batch) if trainer.training else batch

        strategy.batch_to_device = to_device_then_shorten  # type: ignore[method-assign]

        def restore() -> None:
            strategy.__dict__.pop("batch_to_device", None)
            progress.rows_per_sample, progress.full_length = 1, None
            self._restore = _nothing

        self._restore = restore

    def _shortened(self, trainer: Trainer, batch: Any) -> Any:
        progress = Progress.of(trainer)
        shape = batch_shape(batch)
        if shape is None:
            raise MisconfigurationException(
                f"batch of type {type(batch).__name__}: holds no tensor of shape (B, T, ...) for `SequenceLengthWarmup`"
                " to shorten."
            )
        if shape[1] > self.lengths.longest:
            raise MisconfigurationException(
                f"batch of length {shape[1]}: `SequenceLengthWarmup(max_length={self.lengths.longest})` would never"
                f" reach it; set max_length to {shape[1]}."
            )
        length = min(self.length(progress.steps + 1), shape[1])
        self._watch_compilations(length)
        progress.full_length = shape[1]
        progress.rows_per_sample = shape[1] // length if self.mode == "melt" else 1
        if length == shape[1]:
            return batch
        return (melt if self.mode == "melt" else truncate)(batch, shape, length)

    def _watch_compilations(self, length: int) -> None:
        if length == self._last:
            return
        graphs = compiled_graphs()
        self._recompiled = self._recompiled + 1 if graphs > self._graphs else 0
        self._last, self._graphs = length, graphs
        if self._recompiled == _RECOMPILED_IN_A_ROW:
            left = sum(n > length for n in self.lengths.distinct())
            rank_zero_warn(
                f"`SequenceLengthWarmup`: each of the last {_RECOMPILED_IN_A_ROW} lengths cost a compilation,"
                f" {left + 1} are to come, and torch gives up after 8; compile without dynamic=False, or raise"
                f" multiple_of={self.multiple_of}."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = self._recompiled = 0
        self._graphs = compiled_graphs()
        step = Progress.of(trainer).steps + 1
        lengths = self.lengths.distinct()
        rank_zero_info(
            f"sequence length: {self.lengths.at(step)} of {self.lengths.longest} at step {step}, {len(lengths)}"
            f" distinct lengths in all{' (log only)' if self.action == 'log' else ''}"
        )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if is_logging_step(trainer):
            step = Progress.of(trainer).start.steps + 1
            log_number(pl_module, "stability/sequence_length", self.lengths.at(step))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()


def _nothing() -> None:
    pass
