"""What a spike is: a value judged against those accepted before it, wholly on its device, without a host sync.

Every quantity is a 0-d tensor and every decision a masked write, so nothing here waits for the device. What is not
finite is a spike by definition, never enters a statistic, and is never multiplied by anything: 0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

#: Median absolute deviation to standard deviation, for a normal distribution.
MAD_TO_SIGMA = 1.4826

#: Why a step was judged a spike, by code; the highest that applies is the one recorded.
CAUSES = ("none", "ratio", "z_score", "threshold", "non_finite", "overflow")
RATIO, Z_SCORE, THRESHOLD, NON_FINITE, OVERFLOW = range(1, 6)


@dataclass(frozen=True)
class SpikeRule:
    """When one value counts as a spike; a trigger of ``None`` is off."""

    threshold: float | None = None
    """Absolute: above this value. In force from the first step."""
    z_score: float | None = None
    """Above the window's median by more than so many robust standard deviations."""
    ratio: float | None = None
    """Above the running mean times this."""
    min_spread: float = 0.0
    """Floor on that standard deviation, as a fraction of the median: a constant history has none of its own."""
    warmup_steps: int = 1
    """Values to accept before ``z_score`` and ``ratio`` are in force, at start and after the window was cleared."""


class Judgement(NamedTuple):
    """0-d tensors about one value, or about the one of several that is furthest above its limit."""

    cause: Tensor
    """int64, index into ``CAUSES``."""
    limit: Tensor
    """fp32, the smallest limit in force; inf where none is."""
    score: Tensor
    """fp32, value / limit: above 1 is a spike, inf is not finite."""
    signal: Tensor
    """int64, which of the values it is about."""


class Verdict(NamedTuple):
    """What a step comes to: bool 0-d tensors, and the judgement behind them."""

    skip: Tensor
    stop: Tensor
    judgement: Judgement


class AcceptedWindow:
    """Ring of the last accepted values and their exponential running mean (span: the window), on one device."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._places = torch.arange(size)
        self.forget()

    def forget(self) -> None:
        """Begin anew, on the CPU."""
        self.values = torch.full((self.size,), torch.inf)  # fp32; unused places hold inf and sort last
        self.count = torch.zeros((), dtype=torch.int64)  # accepted since the start or the last clearing
        self.running = torch.zeros(())

    def to(self, device: torch.device) -> None:
        """Move to a device; nothing happens if it is there already."""
        for name in ("values", "count", "running", "_places"):
            setattr(self, name, getattr(self, name).to(device))

    def centre(self) -> tuple[Tensor, Tensor]:
        """(median, median absolute deviation) of the values; not finite where there is none."""
        used = self.count.clamp(1, self.size)
        middle = torch.stack([(used - 1) // 2, used // 2])  # one place, or the two beside the middle
        median = self.values.sort().values[middle].mean()
        return median, (self.values - median).abs().sort().values[middle].mean()

    def judge(self, value: Tensor, rule: SpikeRule) -> Judgement:
        """Compare a 0-d fp32 value with what was accepted before it."""
        cause = torch.zeros_like(self.count)
        limit = torch.full_like(value, torch.inf)
        unsure = self.count < rule.warmup_steps
        bounds: list[tuple[int, Tensor]] = []
        if rule.ratio is not None:
            bounds.append((RATIO, (self.running * rule.ratio).masked_fill(unsure, torch.inf)))
        if rule.z_score is not None:
            median, deviation = self.centre()
            spread = torch.maximum(deviation * MAD_TO_SIGMA, median.abs() * rule.min_spread)
            bounds.append((Z_SCORE, (median + spread * rule.z_score).masked_fill(unsure, torch.inf)))
        if rule.threshold is not None:
            bounds.append((THRESHOLD, torch.full_like(value, rule.threshold)))
        for code, bound in bounds:
            cause = cause.masked_fill(value > bound, code)
            limit = torch.minimum(limit, bound)
        not_finite = ~torch.isfinite(value)
        score = (value / limit).masked_fill(not_finite, torch.inf)
        return Judgement(cause.masked_fill(not_finite, NON_FINITE), limit, score, torch.zeros_like(cause))

    def admit(self, value: Tensor, accepted: Tensor, clear: Tensor) -> None:
        """Forget everything where ``clear``, then take the value in where ``accepted``; a zero tells nothing."""
        accepted = accepted & (value != 0)
        values, count = self.values.masked_fill(clear, torch.inf), self.count.masked_fill(clear, 0)
        here = (self._places == count % self.size) & accepted
        self.values = torch.where(here, value, values)
        moved = self.running + (value - self.running) * (2 / (self.size + 1))
        self.running = torch.where(accepted, torch.where(count == 0, value, moved), self.running)
        self.count = count + accepted

    def state_dict(self) -> dict[str, Any]:
        """Accepted values, oldest first, and their running mean. Waits for the device."""
        count, values = int(self.count), self.values.tolist()
        start = count % self.size
        return {
            "values": values[:count] if count < self.size else values[start:] + values[:start],
            "running": float(self.running),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore on the CPU; of a longer window than this one the newest values are kept."""
        kept = [float(v) for v in state["values"]][-self.size :]
        self.forget()
        self.values[: len(kept)] = torch.tensor(kept)
        self.count += len(kept)
        self.running += float(state["running"])


class SpikeDetector:
    """Judge one or several values of a step together, and bound how often in a row they may be called a spike.

    A value is taken into its window only if no value of the step is a spike. After ``max_skips`` skipped steps in a
    row the next spike is the new normal (``at_cap="accept"``: windows are cleared and begin with it) or the end
    (``"stop"``). What is not finite is never accepted: at the cap it ends in stop in either case. An overflow under a
    loss scale above 1 is for the scaler to cure and does not count towards the cap.
    """

    def __init__(
        self, rules: dict[str, SpikeRule], window: int, max_skips: int, at_cap: Literal["accept", "stop"]
    ) -> None:
        self.rules = rules
        self.windows = {name: AcceptedWindow(window) for name in rules}
        self.max_skips = max_skips
        self.at_cap = at_cap
        self.consecutive = torch.zeros((), dtype=torch.int64)

    def to(self, device: torch.device) -> None:
        """Move all statistics to a device; nothing happens if they are there already."""
        self.consecutive = self.consecutive.to(device)
        for window in self.windows.values():
            window.to(device)

    def observe(self, values: dict[str, Tensor], loss_scale: Tensor | None = None) -> Verdict:
        """Judge the values of one step by name (0-d fp32, on one device) and take them in if they are accepted."""
        judgement = self._judge(values)
        bad, not_finite = judgement.cause > 0, judgement.cause == NON_FINITE
        never = torch.zeros_like(bad)
        overflow = never if loss_scale is None else not_finite & (loss_scale > 1.0)
        spent = bad & ~overflow & (self.consecutive >= self.max_skips)
        accepted_anyway = spent & ~not_finite if self.at_cap == "accept" else never
        skip = bad & ~accepted_anyway
        row = self.consecutive + (bad & ~overflow)
        self.consecutive = torch.where(skip, row, torch.zeros_like(row))
        for name, window in self.windows.items():
            window.admit(values[name], ~skip, accepted_anyway)
        cause = judgement.cause.masked_fill(overflow, OVERFLOW)
        return Verdict(skip, spent & ~accepted_anyway, judgement._replace(cause=cause))

    def end_row(self) -> None:
        """Count skips in a row from here on."""
        self.consecutive = torch.zeros_like(self.consecutive)

    def _judge(self, values: dict[str, Tensor]) -> Judgement:
        """The judgement of the value that is nearest to being a spike, or furthest beyond."""
        first, *others = (window.judge(values[name], self.rules[name]) for name, window in self.windows.items())
        for number, other in enumerate(others, start=1):
            further = other.score > first.score
            other = other._replace(signal=torch.full_like(other.signal, number))
            first = Judgement(*(torch.where(further, b, a) for a, b in zip(first, other, strict=True)))
        return first

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. Waits for the device."""
        windows = {name: window.state_dict() for name, window in self.windows.items()}
        return {"consecutive": int(self.consecutive), "windows": windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore on the CPU; a signal that the state lacks begins anew, one that is no longer judged is left."""
        self.consecutive = torch.tensor(int(state["consecutive"]))
        for name, window in self.windows.items():
            if name in state["windows"]:
                window.load_state_dict(state["windows"][name])
