"""Where the time of a step goes on this rank: all of it, and what was spent on its own, not waiting for others."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class StepClock:
    """Times between the ends of optimizer steps.

    A rank that is late makes all others wait in the next collective, so all ranks' steps take equally long. What tells
    them apart is the time outside of everything that may wait for another rank: outside the backward pass and the
    step, and outside the network's forward pass where its weights are gathered there.

    Whole times on CUDA are between events on the device, which are read late and without a wait in between.

    Args:
        device: Where the network runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._own_since: float | None = time.perf_counter()
        self._own = 0.0
        self._judge = True
        self._began = self._now()
        self._pauses: list[tuple[Any, Any]] = []
        self._paused_at: Any = None
        self._steps: list[tuple[list[tuple[Any, Any]], float, bool]] = []  # (spans: whole, pauses; own; judged)

    def _now(self) -> Any:
        """A moment: an event on the device, or seconds on the host."""
        if self._cuda is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def wait_begins(self) -> None:
        """From here on other ranks may be waited for."""
        if self._own_since is not None:
            self._own += time.perf_counter() - self._own_since
        self._own_since = None

    def wait_ends(self) -> None:
        """From here on this rank is on its own."""
        if self._own_since is None:
            self._own_since = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Other ranks are waited for, in what may be a wait already."""
        was_on_its_own = self._own_since is not None
        self.wait_begins()
        yield
        if was_on_its_own:
            self.wait_ends()

    def pause(self) -> None:
        """What begins here is no part of the step."""
        self.wait_begins()
        self._paused_at = self._now()

    def go_on(self) -> None:
        """The pause ends."""
        if self._paused_at is not None:
            self._pauses.append((self._paused_at, self._now()))
        self._paused_at = None
        self.wait_ends()

    def disregard(self) -> None:
        """The step under way has something in it that no step should be compared with."""
        self._judge = False

    def step_ends(self) -> None:
        """A step ends, and the next begins."""
        self.wait_begins()
        now = self._now()
        self._steps.append(([(self._began, now), *self._pauses], self._own, self._judge))
        self._began, self._pauses, self._own, self._judge = now, [], 0.0, True
        self.wait_ends()

    def take(self) -> list[tuple[float, float]]:
        """(whole, own) seconds of every step since the last call, NaN where not to be judged; waits for the device."""
        taken, self._steps = self._steps, []
        rows = []
        for spans, own, judge in taken:
            whole, *pauses = (_seconds(*span) for span in spans)
            rows.append((whole - sum(pauses), own) if judge else (math.nan, math.nan))
        return rows


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def calls_that_gather(module: nn.Module) -> list[nn.Module]:
    """The modules whose forward pass may wait for other ranks: direct children with sharded weights; else none."""

    def is_sharded(child: nn.Module) -> bool:
        wrapped = any("FullyShardedDataParallel" in type(m).__name__ for m in child.modules())
        return wrapped or any(hasattr(p, "placements") for p in child.parameters())

    return [child for child in module.children() if is_sharded(child)]
