"""Numbers of every optimizer step that reach the host late, so that no step waits for the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

#: Steps that pass on a CUDA device before a row is read. The host runs one or two steps ahead of the device at most,
#: so by then the row has long been copied. On a CPU nothing is in flight: rows are read in their own step.
LAG = 4


class EventRing:
    """A queue of short rows, one per optimizer step, copied to pinned memory without waiting.

    A row that was pushed in step ``s`` is returned by ``take`` in step ``s + lag``, neither earlier nor later, whatever
    the device's speed: what the host does with it falls on the same step in every run. ``flush`` returns all at once,
    before a save, at the end, or when the run fails.

    Args:
        lag: Steps between push and take on a CUDA device, >= 0.
        cpu_lag: The same on a CPU.
    """

    def __init__(self, lag: int = LAG, cpu_lag: int = 0) -> None:
        self._cuda_lag, self._cpu_lag = lag, cpu_lag
        self.lag = 0
        self._waiting: deque[tuple[Any, Tensor, Any]] = deque()  # (key, row on the host, its copy's event)
        self._pinned: list[Tensor] = []  # free rows

    def push(self, key: tuple[int, ...], row: Tensor) -> None:
        """Queue a row (n,) under a key whose first number is the step."""
        if row.device.type != "cuda":
            self.lag = self._cpu_lag
            self._waiting.append((key, row.cpu().clone(), None))
            return
        self.lag = self._cuda_lag
        free = next((i for i, host in enumerate(self._pinned) if host.shape == row.shape), None)
        host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True) if free is None else self._pinned.pop(free)
        host.copy_(row, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._waiting.append((key, host, copied))

    def take(self, step: int) -> list[tuple[tuple[int, ...], list[float]]]:
        """(key, row) of every row that is due at ``step``, oldest first."""
        taken = []
        while self._waiting and self._waiting[0][0][0] <= step - self.lag:
            key, host, copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
                self._pinned.append(host)
            taken.append((key, host.tolist()))
        return taken

    def flush(self) -> list[tuple[tuple[int, ...], list[float]]]:
        """(key, row) of all that is queued, oldest first. Waits for the device."""
        return self.take(self._waiting[-1][0][0] + self.lag) if self._waiting else []
