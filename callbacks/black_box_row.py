"""What is kept of an optimizer step: numbers on the device that nobody waits for, and what the host knows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class HostRow:
    """What the host knows of a step on this rank."""

    step: int = 0
    lr: float = 0.0
    """Of the first group, as the step used it."""
    samples: list[int] = field(default_factory=list)
    """Stream indices, micro-batch after micro-batch."""
    seeds: list[int] = field(default_factory=list)
    """What torch's generator was seeded with last, before each micro-batch."""
    tokens: list[Tensor] = field(default_factory=list)
    """Token ids (B, T) of each micro-batch, where they are."""


class DeviceRing:
    """The numbers of the last steps, each row written over the oldest, on the device where they arise.

    Args:
        length: Steps, >= 1.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._names: list[str] = []
        self._values: Tensor | None = None  # (length, names) fp32

    def write(self, step: int, values: dict[str, Tensor | float], parts: tuple[list[str], Tensor]) -> None:
        """Keep a step's numbers and those of its parts, (n,); the same names in every step."""
        named, rest = parts
        device = rest.device
        numbers = [v.detach().to(device, torch.float32) if isinstance(v, Tensor) else float(v) for v in values.values()]
        names = [*values, *named]
        if self._values is None or names != self._names or self._values.device != device:
            self._names, self._values = names, torch.full((self.length, len(names)), torch.nan, device=device)
        row = self._values[step % self.length]
        row[len(numbers) :].copy_(rest)
        for index, number in enumerate(numbers):
            row[index].copy_(number) if isinstance(number, Tensor) else row[index].fill_(number)

    def read(self, step: int) -> dict[str, float]:
        """A step's numbers by name. Waits for the device."""
        if self._values is None:
            return {}
        return dict(zip(self._names, self._values[step % self.length].tolist(), strict=True))

    def clear(self) -> None:
        """Forget everything."""
        self._names, self._values = [], None


def as_record(row: HostRow, numbers: dict[str, float]) -> dict[str, Any]:
    """A step as plain data."""
    return {"step": row.step, "lr": row.lr, **numbers, "samples": row.samples, "seeds": row.seeds}


def texts(rows: deque[HostRow], tokenizer: Any) -> str:
    """The samples whose tokens are kept, newest step first: a line that names each, and what it says."""
    lines = []
    for row in reversed(rows):
        ids = [one for batch in row.tokens for one in batch.tolist()]
        for place, tokens in zip(row.samples, ids, strict=False):
            said = str(tokens) if tokenizer is None else str(tokenizer.decode(tokens))
            lines.append(f"=== step {row.step}, sample {place}\n{said}\n")
    return "\n".join(lines)
