"""Optimizer state that exists from the start, so that saving and loading never change a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from .base import MisconfigurationException


def initialise_state(optimizer: Optimizer) -> None:
    """Give every parameter of an Adam or AdamW the state that its first step would create, before any step.

    Without it torch's distributed state getter takes a dummy step when it finds no state (saving changes the run), and
    a parameter that never had a gradient has no state to save, so the checkpoint cannot be loaded under FSDP2.
    Parameters that have state keep it. Other optimizers are left alone.
    """
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


def zero_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Zero the moments and step counts of some parameters, in place and on their device.

    Raises:
        MisconfigurationException: when a state is not of its parameter's shape, or no floating-point number: what its
            zero looks like is not known here (8-bit codes, factored moments).
    """
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if name == "step":
                state[name] = value.zero_() if isinstance(value, Tensor) else 0
            elif isinstance(value, Tensor):
                if value.shape != parameter.shape or not value.is_floating_point():
                    raise MisconfigurationException(
                        f"optimizer state {name!r} of {type(optimizer).__name__} ({value.dtype},"
                        f" {tuple(value.shape)}): cannot be zeroed as moments can; keep the moments."
                    )
                value.zero_()


def step_count(optimizer: Optimizer) -> int | None:
    """Largest step count in the optimizer's state; ``None`` if it keeps none. Waits for the device once.

    The largest, since a parameter may have stood still: frozen for a while, or no shard of it on this rank (FSDP1).
    """
    counts = [torch.as_tensor(state["step"]) for state in optimizer.state.values() if "step" in state]
    return int(torch.stack([c.to(counts[0].device, torch.float32) for c in counts]).max()) if counts else None
