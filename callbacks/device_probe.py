"""The same small piece of work on every card, to find the one that has become slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SIZE, _PRODUCTS = 2048, 8  # about a fifth of a millisecond on an H100


class DeviceProbe:
    """Time a few matrix products on a CUDA device; on others nothing is done.

    A card that is hot or broken makes every rank's step as slow as its own, and in no rank's Python is a trace of it.
    The time of work that needs no other rank tells.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._matrix: Tensor | None = None
        self._events: tuple[Any, Any] | None = None

    def start(self) -> None:
        """Queue the work; nothing waits."""
        if self._device is None:
            return
        if self._matrix is None:
            self._matrix = torch.zeros(_SIZE, _SIZE, dtype=torch.bfloat16, device=self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._matrix @ self._matrix  # so that what is timed does not begin with a launch
        begin.record()
        for _ in range(_PRODUCTS):
            self._matrix @ self._matrix
        end.record()
        self._events = (begin, end)

    def seconds(self) -> float:
        """Of the work last started, waiting for it; 0 where there is none."""
        if self._events is None:
            return 0.0
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
