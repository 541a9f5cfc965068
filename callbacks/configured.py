"""Optimizers and schedulers as the code built them, as against what a checkpoint made of them.

A restored optimizer or scheduler brings its old hyper-parameters along and says nothing.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import TYPE_CHECKING, Any

from .base import MisconfigurationException, rank_zero_info, rank_zero_warn
from .private_optimizer_names import inner_schedulers
from .scheduler_settings import GROUP_RATES, groups, options, rates, unsaved_rates

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Difference = tuple[str, Any, Any]  # (name, in the checkpoint, in the code)


class Configured:
    """Optimizers and schedulers as they were built, remembered before a checkpoint is restored into them.

    ``on_fit_start`` is the moment: they exist by then under every strategy, and are restored after it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.options = options(trainer)
        self.rates = rates(trainer)
        self.unsaved = unsaved_rates(trainer)
        self._groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in groups(trainer)]
        self._states = [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self.lrs = [float(group["lr"]) for group in self._groups]

    def write_options(self, trainer: Trainer) -> None:
        """Put the configured options back into the groups."""
        for index, (group, own) in enumerate(zip(groups(trainer), self._groups, strict=True)):
            group.update({k: v for k, v in own.items() if f"group {index} {k}" in self.options})

    def write_rates(self, trainer: Trainer) -> None:
        """Rebuild rates and schedulers as configured, and step these forward to where they stand now."""
        # One that watches a metric is a function of what it saw, not of a count: its reductions of the rate stay.
        watching = [_watches_a_metric(config.scheduler) for config in trainer.lr_scheduler_configs]
        keys = GROUP_RATES if any(watching) else ("lr", *GROUP_RATES)
        for group, own in zip(groups(trainer), self._groups, strict=True):
            group.update({k: copy.deepcopy(own[k]) for k in keys if k in own})
        for config, state, watches in zip(trainer.lr_scheduler_configs, self._states, watching, strict=True):
            scheduler: Any = config.scheduler
            if watches:
                learned = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
                vars(scheduler).update({k: v for k, v in state.items() if k not in learned})
                continue
            steps = _steps_taken(scheduler)
            scheduler.load_state_dict(copy.deepcopy(state))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # no optimizer step between two of the scheduler's
                for _ in range(steps):
                    scheduler.step()


def _watches_a_metric(scheduler: Any) -> bool:
    return "metrics" in inspect.signature(scheduler.step).parameters


def _steps_taken(scheduler: Any) -> int:
    steps = getattr(scheduler, "last_epoch", None)
    return (
        _steps_taken(inner_schedulers(scheduler)[0]) if steps is None else int(steps)
    )  # ChainedScheduler has no count


def settle(
    trainer: Trainer, configured: Configured, recorded: dict[str, Any] | None, on_conflict: str, acts: bool
) -> dict[str, Any] | None:
    """Compare what was restored with what the code has, and settle it: options by the code, rates by ``on_conflict``.

    Args:
        recorded: What an earlier run followed and no scheduler saves (see ``unsaved_rates``); ``None``: not known.
        on_conflict: ``error``, ``override`` or ``checkpoint``.
        acts: False: say what would be done, and change nothing.

    Returns:
        What this run follows, to be recorded.

    Raises:
        MisconfigurationException: under ``error``, when rates differ.
    """
    for name, old, new in differences(options(trainer), configured.options):
        rank_zero_info(f"LROverride: {name} {old} -> {new}" + ("" if acts else " (would be)"))
    conflicts = differences(rates(trainer), configured.rates) + differences(recorded or {}, configured.unsaved)
    if not acts:
        if conflicts:
            rank_zero_info(f"LROverride: would settle {listed(conflicts)} (on_conflict: {on_conflict})")
        return recorded
    if conflicts and on_conflict == "error":
        raise MisconfigurationException(
            f"`LROverride`: the checkpoint was trained with other hyper-parameters ({listed(conflicts)}); give"
            " on_conflict='override' to follow the code or on_conflict='checkpoint' to follow the checkpoint."
        )
    if conflicts:
        rank_zero_info(f"LROverride: {listed(conflicts)} (on_conflict: {on_conflict})")
    if on_conflict == "checkpoint" and any("lr_lambda" in name for name, *_ in conflicts):
        rank_zero_warn("LROverride: a LambdaLR's function is in no checkpoint; that of the code is followed.")
    if on_conflict == "error" and recorded is None:
        _warn_of_restored_rates(trainer, configured)
    configured.write_options(trainer)
    if on_conflict == "override" and (conflicts or recorded is None):
        configured.write_rates(trainer)
    return recorded if on_conflict == "checkpoint" and recorded is not None else configured.unsaved


def _warn_of_restored_rates(trainer: Trainer, configured: Configured) -> None:
    restored = [float(group["lr"]) for group in groups(trainer)]
    if trainer.lr_scheduler_configs or restored == configured.lrs:
        return
    rank_zero_warn(
        f"LROverride: the checkpoint restored the rates {restored} and the code has {configured.lrs}; no scheduler sets"
        " them, so the restored ones go on unless the LightningModule sets its own; on_conflict='override' follows the"
        " code."
    )


def differences(restored: dict[str, Any], configured: dict[str, Any]) -> list[Difference]:
    """What two sets of hyper-parameters disagree in, of what both have."""
    return [(k, restored[k], configured[k]) for k in configured if k in restored and restored[k] != configured[k]]


def listed(found: list[Difference]) -> str:
    """The differences as one phrase; long values are cut."""
    return "; ".join(f"{name} {_short(old)} in the checkpoint but {_short(new)} now" for name, old, new in found)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
