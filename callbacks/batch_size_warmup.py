"""Batch-size warm-up: the global batch grows with the samples that the run has consumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from .accumulation import AccumulationWindows, AverageOver, Window
from .base import MisconfigurationException, is_logging_step, log_number, rank_zero_info
from .batch_schedule import BatchSchedule, Ramp, build_schedule
from .learning_rate import EffectiveLR
from .progress import Mark, Progress
from .topology import data_parallel_size

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


class RampWindow(Window):
    """The window before the run has begun: no number of batches makes a step all the way."""

    def __rtruediv__(self, batches: float) -> float:
        raise MisconfigurationException(
            "`trainer.estimated_stepping_batches`: under `BatchSizeWarmup` the batches per step change; take the"
            " horizon of a schedule from its `steps_in(samples)`."
        )


class BatchSizeWarmup(AccumulationWindows):
    """Grow the global batch over the run, in whole windows, by changing how many micro-batches make a step.

    The batch of a step is a function of the samples committed before it, and of nothing else: a resume lands in the
    right stage and window, also on another number of ranks, and there is no state to save. The ramp changes between
    two windows only, and the weights of every window sum to one. It takes the place of ``AccumulationWindows``.

    Ramps (counts may be written ``6_000_000``, ``6M`` or ``50B``):

    - ``"16 16 6_000_000"`` or ``[16, 16, 6000000]``: start, increment, samples, exactly as Megatron-LM's
      ``--rampup-batch-size``: from 16 up by 16 at equal distances, the full batch from 6M samples on;
    - ``"1024 for 7200 steps then 2048"``: stages whose lengths are steps, samples or tokens; the last stage, the full
      batch, may be left out. Also as a list ``[{batch: 1024, steps: 7200}, {batch: 2048}]``;
    - ``"256 doubling at 168B, 337B tokens"``.

    Lengths in steps and tokens become marks in samples once, when the ramp is laid out: steps by the batches before,
    tokens by ``tokens_per_sample``. A window that begins at or behind a mark has the new size. Where a finite epoch
    cuts a window short, the marks stay where they are.

    Steps, samples and tokens of a schedule, of validation and of checkpoints agree with the ramp, since ``Progress``
    counts all three; ``samples_before(step)`` and ``steps_in(samples)`` convert a horizon.
    ``trainer.estimated_stepping_batches`` cannot, and says so.

    Logged at logging steps: ``stability/batch_size`` (samples of this step's window), and what ``AccumulationWindows``
    logs: ``progress/micro_batches``, with ``average_over="tokens"`` also ``progress/counted_tokens``.

    Args:
        ramp: The ramp, in one of the forms above.
        global_batch: Samples per step at the end of the ramp, over all ranks; ``None``: the data module's attribute
            ``global_batch``.
        micro_batch: Samples per rank and forward pass: the most that fit into memory, which nothing here measures;
            ``None``: the data module's attribute ``micro_batch``.
        tokens_per_sample: For ramps in tokens; ``None``: the data module's attribute ``sequence_length``, if it has it.
        fit_micro_batch: ``True``: a stage whose batch is no multiple of ``micro_batch * ranks`` takes the largest
            smaller micro-batch that divides it; the others, the full batch too, take ``micro_batch`` itself, and are as
            fast as in a run without a ramp. The loader must follow: it asks ``window_at``, as lit-stable's does.
        lr_factor: What the learning rate of a step is multiplied by, where ``global_batch`` is what the schedule was
            made for: ``none``: 1; ``sqrt``: (batch / global_batch)^0.5; ``linear``: batch / global_batch.
        average_over: What a step is the mean over, as in ``AccumulationWindows``; ``None``: the data module's attribute
            ``average_over``, else ``micro_batches``.
        action: ``log``: train on the full batch always and log the size that the ramp would have had.

    Raises:
        MisconfigurationException: when the ramp cannot be read or does not end at ``global_batch``, when a size is
            given nowhere or differs from the data module's, when a stage still to come is no multiple of what all
            ranks take at once (the nearest legal sizes are named), when the loader hands out other micro-batches,
            beside ``AccumulationWindows``, and as that class says.

    Example::

        >>> ramp = BatchSizeWarmup("16 16 6_000_000", global_batch=2048, micro_batch=4)
        >>> ramp.batch(1_519_744), ramp.samples_before(12_001)
        (528, 1519744)

    Source: GPT-3 (Brown et al. 2020, arXiv:2005.14165, section 2.3 and appendix B), Megatron-LM, BLOOM, BloombergGPT
    (Wu et al. 2023, arXiv:2303.17564).
    """

    strict = True

    def __init__(
        self,
        ramp: Ramp,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        tokens_per_sample: int | None = None,
        fit_micro_batch: bool = False,
        lr_factor: Literal["none", "sqrt", "linear"] = "none",
        average_over: AverageOver | None = None,
        action: Literal["act", "log"] = "act",
    ) -> None:
        self.ramp = ramp
        self.tokens_per_sample = tokens_per_sample
        self.fit_micro_batch = fit_micro_batch
        self.lr_factor = lr_factor
        self._given_over = average_over
        self.action = action
        self._given = {"global_batch": global_batch, "micro_batch": micro_batch, "tokens_per_sample": tokens_per_sample}
        self._schedule: BatchSchedule | None = None
        if global_batch is not None and micro_batch is not None:
            self._lay_out(global_batch, micro_batch, average_over or "micro_batches")

    # -- the ramp ----------------------------------------------------------------------------------------------------

    def adopt(self, data: Any) -> None:
        """Take what was not given from a data module's ``global_batch``, ``micro_batch`` and ``sequence_length``."""
        found = {}
        for name, given in self._given.items():
            attribute = "sequence_length" if name == "tokens_per_sample" else name
            theirs = getattr(data, attribute, None)
            if given is not None and theirs is not None and given != theirs:
                raise MisconfigurationException(
                    f"`BatchSizeWarmup({name}={given})`: the data module has {attribute}={theirs}; leave {name} out."
                )
            found[name] = given if given is not None else theirs
        if found["global_batch"] is None or found["micro_batch"] is None:
            lacking = "global_batch" if found["global_batch"] is None else "micro_batch"
            where = "there is no data module" if data is None else f"the data module has no attribute {lacking}"
            raise MisconfigurationException(
                f"`BatchSizeWarmup({lacking}=None)`: {where} to take it from; write"
                f" `BatchSizeWarmup({self.ramp!r}, {lacking}=...)`."
            )
        self.tokens_per_sample = found["tokens_per_sample"]
        over = self._given_over or getattr(data, "average_over", None) or "micro_batches"
        self._lay_out(found["global_batch"], found["micro_batch"], over)

    def _lay_out(self, global_batch: int, micro_batch: int, average_over: AverageOver = "micro_batches") -> None:
        super().__init__(global_batch, micro_batch, average_over)
        try:
            self._schedule = build_schedule(self.ramp, global_batch, self.tokens_per_sample)
        except ValueError as error:
            raise MisconfigurationException(f"`BatchSizeWarmup(ramp={self.ramp!r})`: {error}") from None

    @property
    def schedule(self) -> BatchSchedule:
        """The stages that are trained with: under ``action="log"`` one, the full batch."""
        return BatchSchedule([(self.global_batch, None)]) if self.action == "log" else self._laid_out

    @property
    def _laid_out(self) -> BatchSchedule:
        assert self._schedule is not None, "setup or adopt comes first"
        return self._schedule

    def batch(self, consumed: int) -> int:
        """Samples of the window that opens when ``consumed`` are committed."""
        return self.schedule.batch(consumed)

    def samples_before(self, step: int) -> int:
        """Samples committed before optimizer step ``step``, counted from 1, by the ramp from the start of the run."""
        return self.schedule.samples_before(step)

    def samples_after(self, consumed: int, steps: int) -> int:
        """Samples committed ``steps`` steps after ``consumed``, whatever the batch was on the way there."""
        return self.schedule.samples_after(consumed, steps)

    def steps_in(self, samples: int) -> int:
        """Whole optimizer steps that ``samples`` suffice for."""
        return self.schedule.steps_in(samples)

    def window_at(self, consumed: int, ranks: int) -> tuple[int, int]:
        """(global batch, micro-batch) of the window that opens when ``consumed`` samples are committed."""
        batch = self.batch(consumed)
        return batch, self._micro_batch(batch, ranks)

    def _micro_batch(self, batch: int, ranks: int) -> int:
        if not self.fit_micro_batch:
            return self.micro_batch
        share = batch // ranks
        return next((n for n in range(min(self.micro_batch, share), 0, -1) if share % n == 0), self.micro_batch)

    def stage_problems(self, ranks: int, consumed: int = 0) -> list[str]:
        """The stages still to come that cannot be cut into micro-batches on ``ranks`` ranks, in one line."""
        unit = ranks if self.fit_micro_batch else self.micro_batch * ranks
        illegal = [stage.batch for stage in self.schedule.reached(consumed) if stage.batch % unit]
        if not illegal:
            return []
        first = illegal[0]
        legal = " and ".join(str(n) for n in (first // unit * unit, first // unit * unit + unit) if n)
        several = f" (and {len(illegal) - 1} more)" if len(illegal) > 1 else ""
        product = (
            f"{ranks} data-parallel ranks"
            if self.fit_micro_batch
            else (f"micro_batch x data-parallel ranks = {self.micro_batch} x {ranks} = {unit}")
        )
        remedy = "" if self.fit_micro_batch else ", or set fit_micro_batch"
        return [
            f"`BatchSizeWarmup(ramp={self.ramp!r})`: its batch {first}{several} must be a multiple of {product};"
            f" the nearest legal sizes are {legal}{remedy}."
        ]

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.adopt(trainer.datamodule)  # type: ignore[attr-defined]
            others = [c for c in trainer.callbacks if isinstance(c, AccumulationWindows) and c is not self]  # type: ignore[attr-defined]
            if others and type(others[0]) is AccumulationWindows:
                raise MisconfigurationException(
                    f"`AccumulationWindows(global_batch={others[0].global_batch})`: `BatchSizeWarmup` opens the windows"
                    " already; delete it."
                )
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self._scales_lr:
            self.modify(EffectiveLR.of(trainer))

    @property
    def _scales_lr(self) -> bool:
        return self.lr_factor != "none" and self.action == "act"

    def modify(self, effective: EffectiveLR) -> None:
        """Add what the ramp does to learning rates, if anything; a pure function of progress."""
        if self._scales_lr:
            effective.add("BatchSizeWarmup", self._scaled_lr)

    def _scaled_lr(self, mark: Mark, lr: float, group_index: int) -> float:
        factor: float = (self.batch(mark.samples) / self.global_batch) ** _EXPONENTS[self.lr_factor]
        return lr * factor

    def window_size(self, trainer: Trainer) -> int:
        ranks = data_parallel_size(trainer)
        batch, micro_batch = self.window_at(Progress.of(trainer).samples, ranks)
        return batch // (micro_batch * ranks)

    def handed_out(self, trainer: Trainer) -> int:
        return self.window_at(Progress.of(trainer).samples, data_parallel_size(trainer))[1]

    def _first_window(self, trainer: Trainer) -> Window:
        return super()._first_window(trainer) if self.action == "log" else RampWindow(1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not before: what a resumed run has left behind may be illegal on the ranks it has now.
        consumed = Progress.of(trainer).samples
        if problems := self.stage_problems(data_parallel_size(trainer), consumed):
            raise MisconfigurationException(problems[0])
        super().on_train_start(trainer, pl_module)
        stages = self._laid_out.reached(consumed)
        following = f", then {stages[1].batch} from {stages[1].mark:,} samples on" if len(stages) > 1 else ""
        rank_zero_info(f"batch size: {stages[0].batch}{following}{' (log only)' if self.action == 'log' else ''}")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if is_logging_step(trainer):
            # What the ramp says, also under action="log"; Progress has committed this step already.
            log_number(pl_module, "stability/batch_size", self._laid_out.batch(Progress.of(trainer).start.samples))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage == "fit" and self._scales_lr:
            EffectiveLR.of(trainer).remove("BatchSizeWarmup")
