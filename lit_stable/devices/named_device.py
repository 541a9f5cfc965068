"""A device by the name that torch has for it."""

from __future__ import annotations

import torch


def named_device(name: str) -> torch.device:
    """The device, which must be here.

    Raises:
        ValueError: when it is not, or is none.
    """
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name}: is not here ({str(error).splitlines()[0]}).") from error
    if device.type == "meta":  # torch takes it for a device, and nothing is computed there
        raise ValueError(f"device={name}: computes nothing; name another, as cpu.")
    return device
