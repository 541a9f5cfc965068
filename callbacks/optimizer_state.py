"""Optimizer state that exists from the start, so that saving and loading never change a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .base import MisconfigurationException

# State that is zero in a new optimizer: by the names of torch's Adam family, SGD, Adagrad and RMSprop; of bitsandbytes
# (8-bit codes and the maxima of their blocks); of `EightBitAdam`. Zero codes with zero maxima stand for exact zeros.
ZERO_AT_START = {
    *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum"),
    *("state1", "state2", "absmax1", "absmax2"),
    *("exp_avg_codes", "exp_avg_absmax", "exp_avg_sq_codes", "exp_avg_sq_absmax"),
}
CONSTANT = {"qmap1", "qmap2"}  # tables that the codes are looked up in


def initialise_state(optimizer: Optimizer) -> None:
    """Give every parameter of an Adam, AdamW or SGD the state that its first step would create, before any step.

    Without it torch's distributed state getter takes a dummy step when it finds no state (saving changes the run), and
    a parameter that never had a gradient has no state to save, so the checkpoint cannot be loaded under FSDP2.
    Parameters that have state keep it. An optimizer with an ``initialise_state`` of its own is asked to do it; others
    are left alone, and SGD where it has no state (no momentum) or where zeros are not what it starts from (dampening).
    """
    if hasattr(optimizer, "initialise_state"):
        optimizer.initialise_state()
        return
    if isinstance(optimizer, SGD):
        _initialise_momentum(optimizer)
    if not isinstance(optimizer, (Adam, AdamW)):
        return
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state[parameter]
            if state:
                continue
            # As Adam itself does: a fused kernel wants the count beside the parameter, the loops want it on the host.
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _initialise_momentum(optimizer: SGD) -> None:
    for group in optimizer.param_groups:
        if group["momentum"] == 0 or group["dampening"] != 0:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def zero_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Set what an optimizer has learned of some parameters, or of all, to what a new one holds: zero, in place.

    Codes of 8-bit moments too: bitsandbytes and ``EightBitAdam`` begin with zero codes and zero maxima.

    Raises:
        MisconfigurationException: when it keeps state of a kind that need not be zero at the start.
    """
    states = list(optimizer.state.values()) if parameters is None else [optimizer.state.get(p, {}) for p in parameters]
    kinds = {key for state in states for key, value in state.items() if value is not None}
    if unknown := sorted(kinds - ZERO_AT_START - CONSTANT):
        raise MisconfigurationException(
            f"{type(optimizer).__name__} keeps {', '.join(unknown)}, which may not be zero in a new optimizer, so its"
            f" state cannot be reset; that can be done to {', '.join(sorted(ZERO_AT_START))}."
        )
    for state in states:
        for key, value in state.items():
            if key in ZERO_AT_START and value is not None:
                state[key] = value.zero_() if isinstance(value, Tensor) else type(value)(0)


def step_count(optimizer: Optimizer) -> int | None:
    """Largest step count in the optimizer's state; ``None`` if it keeps none. Waits for the device once.

    The largest, since a parameter may have stood still: frozen for a while, or no shard of it on this rank (FSDP1).
    """
    counts = [torch.as_tensor(state["step"]) for state in optimizer.state.values() if "step" in state]
    return int(torch.stack([c.to(counts[0].device, torch.float32) for c in counts]).max()) if counts else None
