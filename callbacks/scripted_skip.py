"""Skip the optimizer step at steps that are named beforehand."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from .base import (
    MisconfigurationException,
    StabilityCallback,
    is_logging_step,
    log_number,
    rank_zero_info,
    refuse_manual_optimization,
)
from .device_step import clear_all, hook_steps, is_fused, skip_step
from .grad_spike_skip import GradSpikeSkip
from .positions import merge_ranges
from .progress import Mark, Progress
from .schedule_hold import ScheduleHold, refuse_rare_schedulers
from .step_ranges import parse_steps

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class ScriptedSkip(StabilityCallback):
    """Let the optimizer steps of a list change nothing, and consume their data all the same.

    It replays a run whose steps were skipped, by a loss scaler or by hand (Megatron-LM's
    ``--skip-train-iteration-range``), and tells what a skip does from what was wrong with the step. In such a step
    weights, moments and step counts stay bit-identical; its batch counts as consumed, ``trainer.global_step`` and
    ``Progress.steps`` advance, ``Progress.skipped`` counts it. To leave data out instead, so that neither steps nor
    samples advance over them, use lit-stable's ``data.skip_steps``.

    The schedule advances over a skipped step, or holds (``schedule_on_skip``): schedulers that Lightning steps every
    step are then held for that step, and ``Progress.scheduled`` for its samples and tokens. In tr8b-104B's logs the
    rate lags the samples by 0.7k in this way.

    Which steps are skipped is a function of the step number, so there is no state. Forward and backward pass are done,
    and other callbacks judge the step's norm as any other; adaptive clipping and ``SkipAwareEMA`` leave it out.

    Logged at logging steps: ``stability/scripted_skip`` (1 in steps of the list, else 0).

    Attributes:
        skipped: 0-d bool tensor: whether the last step changed nothing.

    Args:
        steps: Optimizer steps, counted from 1: ``13251-14000`` (both included) or single ones.
        schedule_on_skip: ``advance``, or ``hold`` (metaseq, Megatron-LM under a loss scaler).
        action: ``act``, or ``log`` alone.

    Raises:
        MisconfigurationException: when a step cannot be read (all at once) or there is none, under manual optimization,
            for ``hold`` when a scheduler steps every n-th step only, or beside a ``GradSpikeSkip`` that holds too.

    Example::

        >>> ScriptedSkip(["13251-14000"]).skips(14_000)
        True
    """

    order: ClassVar[int] = 34

    def __init__(
        self,
        steps: list[str | int],
        schedule_on_skip: Literal["advance", "hold"] = "advance",
        action: Literal["act", "log"] = "act",
    ) -> None:
        self.steps = list(steps)
        self.schedule_on_skip = schedule_on_skip
        self.action = action
        problems = [] if steps else ["`ScriptedSkip(steps=[])`: skips nothing; name at least one step."]
        ranges = []
        for request in steps:
            try:
                first, last = parse_steps(request)
                ranges.append((first, last + 1))
            except ValueError as error:
                problems.append(f"`ScriptedSkip(steps={request!r})`: {error}")
        if problems:
            raise MisconfigurationException("\n".join(problems))
        self._edges = [edge for both in merge_ranges(ranges) for edge in both]
        self.skipped = torch.zeros((), dtype=torch.bool)
        self._hold = ScheduleHold()
        self._handles: list[Any] = []

    def skips(self, step: int) -> bool:
        """Whether optimizer step ``step``, counted from 1, changes nothing."""
        return self.action == "act" and self._names(step)

    def holds(self, step: int) -> bool:
        """Whether the schedule is held over optimizer step ``step``."""
        return self.schedule_on_skip == "hold" and self.skips(step)

    def _names(self, step: int) -> bool:
        return bisect_right(self._edges, step) % 2 == 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_manual_optimization(
            pl_module, "`ScriptedSkip` acts before Lightning's own optimizer step; use automatic optimization."
        )
        others = [c for c in trainer.callbacks if isinstance(c, GradSpikeSkip) and c.schedule_on_skip == "hold"]  # type: ignore[attr-defined]
        if others and self.schedule_on_skip == "hold":
            raise MisconfigurationException(
                "`ScriptedSkip(schedule_on_skip='hold')`: `GradSpikeSkip` holds the schedule too, and a step that both"
                " skip would be held over twice; let one of them advance."
            )
        Progress.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release(trainer)
        to_come = self._edges[-1] > Progress.of(trainer).steps + 1  # behind the last step that is named
        rank_zero_info(
            f"ScriptedSkip: {'skips' if self.action == 'act' else 'would skip'} steps"
            f" {', '.join(map(str, self.steps))}{'' if to_come else '; all of them are past'}"
        )
        if self.action == "log":
            return
        if self.schedule_on_skip == "hold":
            refuse_rare_schedulers(trainer, "ScriptedSkip")
        self._handles = [hook_steps(trainer, optimizer) for optimizer in trainer.optimizers if is_fused(optimizer)]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._hold.release()
        if self._handles:
            clear_all(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        progress = Progress.of(trainer)
        step = progress.steps
        # On the device only where a fused optimizer reads it there: the decision itself is the host's.
        device = trainer.strategy.root_device if is_fused(optimizer) else torch.device("cpu")
        self.skipped = torch.full((), self.skips(step), device=device)
        if self.skips(step):
            skip_step(trainer, optimizer, self.skipped)
        if self.holds(step):
            progress.note_held(Mark(*(now - then for now, then in zip(progress.mark, progress.start, strict=True))))
            self._hold.hold(trainer)
        if is_logging_step(trainer):
            log_number(pl_module, "stability/scripted_skip", self._names(step))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        self._hold.release()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        clear_all(trainer)
