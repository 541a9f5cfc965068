"""The hyper-parameters of a run's optimizers and schedulers, as flat dicts of plain values by a readable name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from .private_optimizer_names import inner_schedulers

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# What schedulers write into the parameter groups and never change again.
GROUP_RATES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
_PROGRESS = ("optimizer", "last_epoch", "schedulers")  # constructor arguments that are no hyper-parameters
_SAMPLED_STEPS = (0, *(1 << power for power in range(24)))


def groups(trainer: Trainer) -> list[dict[str, Any]]:
    """The parameter groups of all optimizers, in one list."""
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def options(trainer: Trainer) -> dict[str, Any]:
    """Numeric options of every group that no scheduler moves, such as weight_decay, betas and eps, by name."""
    found = {}
    for index, group in enumerate(groups(trainer)):
        cycled = ("betas", "momentum") if "max_momentum" in group else ()
        for key, value in group.items():
            numeric = not isinstance(value, bool) and isinstance(value, (int, float, tuple, list))
            if numeric and key not in ("params", "lr", *GROUP_RATES, *cycled):
                found[f"group {index} {key}"] = plain(value)
    return found


def rates(trainer: Trainer) -> dict[str, Any]:
    """Hyper-parameters of the learning rate, by name: of the groups, and of every scheduler and those it holds."""
    found: dict[str, Any] = {}
    for index, group in enumerate(groups(trainer)):
        found.update({f"group {index} {key}": plain(group[key]) for key in GROUP_RATES if key in group})
    for name, scheduler in schedulers(trainer):
        arguments = set(inspect.signature(type(scheduler).__init__).parameters).difference(_PROGRESS)
        names = {"base_lrs"}.union(*({a, f"_{a}", f"{a}s"} for a in arguments))
        for key in sorted(names & vars(scheduler).keys()):
            if (value := plain(vars(scheduler)[key])) is not None:
                found[f"{name} {key}"] = value
    return found


def unsaved_rates(trainer: Trainer) -> dict[str, Any]:
    """What no checkpoint of Lightning tells: rates that no scheduler sets, and what lambdas are functions of.

    A ``LambdaLR`` is not saved with its function, so another one takes over at the old step in silence. Its values at
    step 0 and at powers of two tell two of them apart; one that is the same everywhere is taken to depend on more than
    the step, and left out.
    """
    found: dict[str, Any] = {}
    if not trainer.lr_scheduler_configs:
        return {f"group {index} lr": plain(group["lr"]) for index, group in enumerate(groups(trainer))}
    for name, scheduler in schedulers(trainer):
        if type(scheduler) is LambdaLR:
            for index, function in enumerate(scheduler.lr_lambdas):
                values = _sample(function)
                if len(set(values)) > 1:
                    found[f"{name} lr_lambda {index}"] = values
    return found


def _sample(function: Any) -> list[float]:
    values = []
    for step in _SAMPLED_STEPS:
        try:
            values.append(float(function(step)))
        except (LookupError, ArithmeticError, ValueError):  # a table or formula that ends
            break
    return values


def schedulers(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """(readable name, scheduler) of every scheduler, those inside others after the one that holds them."""

    def walk(scheduler: Any, name: str) -> Iterator[tuple[str, Any]]:
        yield name, scheduler
        for index, inner in enumerate(inner_schedulers(scheduler)):
            yield from walk(inner, f"{name}[{index}] {type(inner).__name__}")

    for config in trainer.lr_scheduler_configs:
        yield from walk(config.scheduler, type(config.scheduler).__name__)


def plain(value: Any) -> Any:
    """Numbers, text and lists of them, as they come back from a checkpoint; ``None`` for anything else."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        pairs = [[plain(k), plain(v)] for k, v in sorted(value.items())]
        return None if any(None in pair for pair in pairs) else pairs
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return None if None in items else items
    return None
