"""Throw the optimizer's memory away in mid-run, and let it fill again before a weight moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from .base import MisconfigurationException, StabilityCallback, is_logging_step, log_number, rank_zero_warn, refuse_all
from .events import Event, Events, emit
from .learning_rate import EffectiveLR
from .optimizer_state import ZERO_AT_START, zero_state
from .progress import Mark, Progress

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class OptimizerReset(StabilityCallback):
    """Set the optimizer's moments and step counts to zero once, and hold the weights while they fill again.

    The reset happens before the first micro-batch of the step at ``start``, or without one of the first step after a
    resume; a run that begins with the callback and no ``start`` has nothing to reset. For the ``hold_steps`` steps from
    there on the learning rate is 0 (by ``EffectiveLR``): gradients enter the moments, the weights stay bit-identical.
    After n steps the second moment has 1 - beta2^n of its weight: 99.4 % after 100 steps at 0.95. Bias correction
    restarts together with the moments, so that it is exact from the first step; a step count that alone is lost
    multiplies the next updates by sqrt(1 - beta2^t) / (1 - beta1^t), 2.24 at first for (0.9, 0.95).

    It is verified: when the step that follows is about to be taken, all of the state must be zero still on every rank.
    8-bit states are zeroed as well (codes and block maxima). Sharded states are zeroed shard by shard.

    The reset is an event of kind ``optimizer_reset`` (see :class:`~.events.Events`), once in a run.

    ``action="log"``: nothing is changed; when it would have been is printed and logged, and is the event. A resume that
    acts resets then, at ``start`` or at its first step behind it.

    Logged at logging steps: ``stability/optimizer_held`` (1 in steps that are held at rate 0, else 0).

    Resumes: the checkpoint records that the reset was done and where, so it happens once, and a resume within the
    hold holds for the rest of it. Another ``start`` is another reset.

    Source: tr8b-104B chronicles, experiments BNB-5 to BNB-7 of BigScience (a reset that was silently ignored, then
    100 and 300 steps at rate 0).

    Args:
        start: First progress at which the state is reset, in ``unit``, >= 0; ``None``: on resume.
        unit: Of ``start``: optimizer ``steps``, ``samples`` or ``tokens``.
        hold_steps: Optimizer steps at learning rate 0, >= 0; 5 / (1 - beta2) fills the second moment.
        action: ``act``, or ``log`` alone.

    Raises:
        MisconfigurationException: when an argument is out of range, when the optimizer keeps no state or one that this
            class does not know, or when the state is not zero after the reset.

    Example::

        >>> Trainer(callbacks=[OptimizerReset(start=16_800, hold_steps=100)], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 15

    def __init__(
        self,
        start: int | None = None,
        unit: Literal["steps", "samples", "tokens"] = "steps",
        hold_steps: int = 100,
        action: Literal["act", "log"] = "act",
    ) -> None:
        refuse_all(
            f"`OptimizerReset({name}={value})`: must be 0 or more."
            for name, value in (("start", start), ("hold_steps", hold_steps))
            if value is not None and value < 0
        )
        self.start, self.unit, self.hold_steps, self.action = start, unit, hold_steps, action
        self.done: Mark | None = None
        self._acted = True  # whether `done` was more than a line
        self._nothing_to_do = False
        self._has_learned = False  # whether the optimizers of this fit have stepped or were restored
        self._verify: set[int] = set()  # optimizers, by position, whose next step must find zeros

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._has_learned = False
            Progress.of(trainer)
            Events.of(trainer)
            self.modify(EffectiveLR.of(trainer))

    def modify(self, effective: EffectiveLR) -> None:
        """Add what the hold does to learning rates: a pure function of progress, once the reset is done."""
        if self.action == "act":
            effective.add("OptimizerReset", lambda mark, lr, group: 0.0 if self.is_held(mark) else lr)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._has_learned = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._verify = set()
        if self.start is None and self.done is None and not Progress.of(trainer).steps:
            self._nothing_to_do = True
            rank_zero_warn("OptimizerReset: start is not given and nothing was resumed, so nothing is reset.")

    def is_held(self, mark: Mark) -> bool:
        """Whether the step that opened at these counters has rate 0."""
        return self.done is not None and 0 <= mark.steps - self.done.steps < self.hold_steps

    def is_due(self, mark: Mark) -> bool:
        """Whether the reset is still to be done when a step opens at these counters."""
        return self.done is None and (self.start is None or getattr(mark, self.unit) >= self.start)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        mark = Progress.of(trainer).start
        if self._nothing_to_do or not self.is_due(mark):
            return
        self.done, self._acted = mark, self.action == "act"
        self._tell(trainer, mark)
        if self.action == "act":
            for index, optimizer in enumerate(trainer.optimizers):
                if self._has_learned or optimizer.state:  # a new optimizer may have none yet
                    refuse_without_moments(optimizer)
                    zero_state(optimizer)
                self._verify.add(index)

    def _tell(self, trainer: Trainer, mark: Mark) -> None:
        acts = self.action == "act"
        text = (
            f"OptimizerReset: {'sets' if acts else 'would set'} moments and step counts to zero after {mark.steps}"
            f" steps, {mark.samples} samples; learning rate 0 for {self.hold_steps} steps"
        )
        evidence = {"samples": mark.samples, "hold_steps": self.hold_steps, "acted": acts}
        emit(trainer, Event(mark.steps + 1, "optimizer_reset", evidence, text=text), warns=False)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._has_learned = True
        index = next(i for i, own in enumerate(trainer.optimizers) if own is optimizer)
        if index in self._verify:
            self._verify.remove(index)
            zero = largest_state(optimizer) == 0
            if not trainer.strategy.reduce_boolean_decision(zero, all=True):
                raise MisconfigurationException(
                    f"`OptimizerReset`: the state of {type(optimizer).__name__} is not zero after the reset: something"
                    " restored or filled it before the step."
                )
        if is_logging_step(trainer):
            log_number(pl_module, "stability/optimizer_held", self.is_held(Progress.of(trainer).start))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            EffectiveLR.of(trainer).remove("OptimizerReset")

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "unit": self.unit,
            "done": None if self.done is None else list(self.done),
            "acted": self._acted,
            "nothing_to_do": self._nothing_to_do,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        same = (state_dict["start"], state_dict["unit"]) == (self.start, self.unit)
        self._acted = bool(state_dict.get("acted", True))  # older states do not tell
        counts = same and (self._acted or self.action == "log")
        self.done = Mark(*state_dict["done"]) if counts and state_dict["done"] is not None else None
        self._nothing_to_do = same and bool(state_dict["nothing_to_do"])


def refuse_without_moments(optimizer: Optimizer) -> None:
    """Raise when an optimizer keeps nothing that a reset could set to zero."""
    kinds = {key for state in optimizer.state.values() for key, value in state.items() if value is not None}
    if not kinds & ZERO_AT_START:
        name = type(optimizer).__name__
        raise MisconfigurationException(f"`OptimizerReset`: {name} keeps no moments to reset; leave the callback out.")


def largest_state(optimizer: Optimizer) -> float:
    """Largest magnitude in this rank's share of the state that a reset zeroes; NaN if any is. Waits for the device."""
    largest = []
    for state in optimizer.state.values():
        for key, value in state.items():
            if key in ZERO_AT_START and value is not None:
                tensor = value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value)
                if tensor.numel():
                    largest.append(tensor.abs().max().to("cpu", torch.float32))
    return float(torch.stack(largest).max()) if largest else 0.0
