"""Which parameters an optimizer step has moved, for who changes weights right after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .gradient_scaler import FOUND_INF

#: Of a parameter, or of several; a 0-d bool tensor where only the device knows.
Moved = bool | Tensor


def moved_by(optimizer: Any) -> dict[nn.Parameter, Moved]:
    """Of each parameter of an optimizer that has just stepped, whether it may move: not if skipped, not at rate 0.

    For a post-hook that runs before all others, which put back what the step was taken with: ``found_inf``, the rate.
    A rate that is a tensor on a device is not waited for.
    """
    found_inf = getattr(optimizer, FOUND_INF, None)  # ours, a scaler's, or both
    moved: dict[nn.Parameter, Moved] = {}
    for group in optimizer.param_groups:
        rate = group.get("lr")
        turns: Moved = rate != 0 if isinstance(rate, Tensor) and rate.device.type != "cpu" else bool(rate != 0)
        if found_inf is not None and turns is not False:
            turns = (found_inf.reshape(()) == 0) & turns
        moved.update(dict.fromkeys(group["params"], turns))
    return moved


def all_moved(parameters: Iterable[nn.Parameter], moved: dict[nn.Parameter, Moved]) -> Moved:
    """Whether a step has moved every one of these.

    A parameter without a gradient has stood still: one that is frozen, or any where a step is skipped by dropping
    gradients. One of another optimizer is judged by its gradient alone.
    """
    flags: dict[int, Moved] = {}
    for parameter in parameters:
        flag = parameter.grad is not None and moved.get(parameter, True)
        if flag is False:
            return False
        flags[id(flag)] = flag
    together: Moved = True
    for flag in flags.values():
        together = flag & together
    return together
