"""The one place where learning rates, and other values of parameter groups, are changed: for a step, and back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from .base import MisconfigurationException, StabilityCallback, find_or_install, is_logging_step, log_number
from .progress import Mark, Progress
from .step_hooks import refuse_engine, require_step_hooks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: (counters when the window opened, value so far, index of the group over all optimizers) -> value for this step.
Modifier = Callable[[Mark, Any, int], Any]


class EffectiveLR(StabilityCallback):
    """Give each optimizer step the scheduler's learning rate as other callbacks modify it, then put it back.

    A modifier is a function by name: ``EffectiveLR.of(trainer).add("back_off", lambda mark, lr, group: 0.5 * lr)`` in
    ``setup``, ``remove("back_off")`` in ``teardown``. The effective rate stands in the parameter groups from the
    optimizer's step pre-hook to its post-hook and nowhere else: whatever sets the rate (a scheduler of any kind, also
    one that computes the next rate from the present one; the LightningModule itself; nobody) finds its own value again.
    So nothing compounds, checkpoints hold the scheduler's values alone, and a modifier that is a pure function of
    ``mark`` resumes exactly with no state. ``add_option`` does the same for ``weight_decay``, ``betas``, ``eps``.

    Modifiers with ``replaces`` (a new rate, whatever the scheduler says) act first, factors after them, each in the
    order of their names. Outside a training batch the hooks do nothing: torch's distributed state getter takes a dummy
    step when it loads or saves. A rate held as a tensor is changed in place; on a GPU that costs one host sync. A
    LightningModule sets its rates in ``on_train_batch_start`` or by a scheduler: one that writes them into the groups
    within the step (in ``training_step``) would undo an active modifier, and is refused there.

    It installs itself: ``EffectiveLR.of(trainer)``.

    Logged at logging steps: ``stability/lr`` (of the first group that stepped, as it was used, read back from it)
    and ``stability/lr_factor`` (that divided by the scheduler's).

    Attributes:
        own: Per group key that is modified, and ``lr`` always: the value of each group outside the last step.
        used: Likewise the value that the last step used.

    Raises:
        MisconfigurationException: when something else changes within the step what was modified for it, under
            DeepSpeed, and for an optimizer without step hooks.

    Example::

        >>> Trainer(callbacks=[EffectiveLR()], logger=False)  # doctest: +SKIP
    """

    order: ClassVar[int] = 15

    def __init__(self) -> None:
        self.own: dict[str, list[Any]] = {}
        self.used: dict[str, list[Any]] = {}
        self._modifiers: dict[str, dict[str, tuple[bool, Modifier]]] = {"lr": {}}
        self._kept: list[tuple[dict[str, Any], str, Any, Any]] = []  # (group, key, own value, value for the step)
        self._handles: list[Any] = []
        self._in_batch = False

    @staticmethod
    def of(trainer: Trainer) -> EffectiveLR:
        """The trainer's instance, installed if it has none yet."""
        refuse_engine(trainer, "EffectiveLR")
        effective = find_or_install(trainer, EffectiveLR)
        Progress.of(trainer)  # the setup of one installed late is not called, and the counters must be restored
        return effective

    @staticmethod
    def within_a_fit(trainer: Trainer, module: LightningModule) -> EffectiveLR:
        """The same for who finds out after ``setup`` that there is something to modify; from the next step on."""
        effective = EffectiveLR.of(trainer)
        if not effective._handles:
            effective.on_train_start(trainer, module)
        return effective

    @staticmethod
    def rate_of_step(trainer: Trainer, optimizer: Any) -> float | Tensor:
        """The effective rate, in an optimizer's first group, of the step that it now takes; installs nothing.

        In ``on_before_optimizer_step`` the group itself does not tell: in plain precision the pre-hook has run by then,
        under a gradient scaler it has not.
        """
        rate: float | Tensor = optimizer.param_groups[0]["lr"]
        own = next((c for c in trainer.callbacks if isinstance(c, EffectiveLR)), None)  # type: ignore[attr-defined]
        if own is None or not own._modifiers["lr"] or own._kept or not own._in_batch:
            return rate
        before = itertools.takewhile(lambda other: other is not optimizer, trainer.optimizers)
        first = sum(len(other.param_groups) for other in before)
        return float(own.effective("lr", Progress.of(trainer).start, _number(rate), first))

    # -- for other callbacks -----------------------------------------------------------------------------------------

    def add(self, name: str, function: Modifier, replaces: bool = False) -> None:
        """Modify the learning rate; a modifier of the same name is replaced.

        Args:
            name: Unique among all modifiers: the class that adds it.
            function: (mark, rate, index of the group) -> rate; the same on all ranks, no device work.
            replaces: True when the result is no multiple of the rate it is given.
        """
        self.add_option(name, "lr", function, replaces)

    def add_option(self, name: str, key: str, function: Modifier, replaces: bool = False) -> None:
        """Modify another value of the groups that have it, such as ``weight_decay``; see :meth:`add`."""
        self._modifiers.setdefault(key, {})[name] = (replaces, function)

    def remove(self, name: str) -> None:
        """Take away every modifier of that name; nothing happens if there is none."""
        for modifiers in self._modifiers.values():
            modifiers.pop(name, None)

    @property
    def keys(self) -> set[str]:
        """Keys of parameter groups that are modified."""
        return {key for key, modifiers in self._modifiers.items() if modifiers}

    def effective(self, key: str, mark: Mark, value: Any, group: int) -> Any:
        """What all modifiers of ``key`` together make of a value."""
        ranked = sorted(self._modifiers[key].items(), key=lambda item: (not item[1][0], item[0]))
        for _, (_, function) in ranked:
            value = function(mark, value, group)
        return value

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            EffectiveLR.of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()
        self.own, self.used = {}, {}
        progress, first = Progress.of(trainer), 0
        for optimizer in trainer.optimizers:
            require_step_hooks(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(self._pre_hook(progress, first)))
            self._handles.append(optimizer.register_step_post_hook(self._post_hook))
            first += len(optimizer.param_groups)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._in_batch = True
        self.own, self.used = {}, {}

    def _pre_hook(self, progress: Progress, first: int) -> Callable[..., None]:
        def set_effective(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not self._in_batch:
                return
            # In plain precision this runs before the closure, so before the step is committed; under a gradient scaler
            # after it. `progress.start` is the same in both.
            for index, group in enumerate(optimizer.param_groups, first):
                for key in self._modifiers.keys() & group.keys():
                    self._set(group, key, self.effective(key, progress.start, _number(group[key]), index))

        return set_effective

    def _set(self, group: dict[str, Any], key: str, value: Any) -> None:
        held = group[key]
        own = held.clone() if isinstance(held, Tensor) else held
        self.own.setdefault(key, []).append(_number(own))
        if value != _number(own):
            _write(group, key, value)
        self._kept.append((group, key, own, _number(group[key])))

    def _post_hook(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group, key, own, given in self._kept:
            used = _number(group[key])
            self.used.setdefault(key, []).append(used)
            if used != given and given != _number(own):
                raise MisconfigurationException(
                    f"optimizer group: {key} was set to {given} for the step and something else made it {used} within"
                    f" it; set the schedule's {key} in on_train_batch_start or by a scheduler."
                )
        self._put_back()

    def _put_back(self) -> None:
        for group, key, own, given in self._kept:
            if _number(group[key]) == given != _number(own):
                _write(group, key, own)
        self._kept = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._in_batch = False
        if not (self.used and is_logging_step(trainer)):
            return
        lr, own = self.used["lr"][0], self.own["lr"][0]
        log_number(pl_module, "stability/lr", lr)
        factor = lr / own if own else (math.inf if lr else 1.0)
        log_number(pl_module, "stability/lr_factor", factor)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # After an exception too: a closure that raised leaves no post-hook behind, and a save may follow.
        self._release()

    def _release(self) -> None:
        self._put_back()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._in_batch = False


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _write(group: dict[str, Any], key: str, value: Any) -> None:
    # In place where it is a tensor: a captured or compiled step reads that very tensor.
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
