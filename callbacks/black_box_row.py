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
        self._held = self._nothing()

    def _nothing(self) -> list[tuple[int, set[str]]]:
        """By row: of which step it is, and what is written of it."""
        return [(-1, set())] * self.length

    def write(self, step: int, values: dict[str, Tensor | float], parts: tuple[list[str], Tensor]) -> None:
        """Keep a step's numbers and those of its parts, (n,)."""
        named, rest = parts
        names = [*values, *named]
        if names != self._names[: len(names)] or rest.device != self.device:
            self._arrange([*names, *(name for name in self._names if name not in names)], rest.device)
        row = self._row(step, set(names))
        row[len(values) : len(names)].copy_(rest)
        for index, number in enumerate(values.values()):
            _set(row[index], number)

    def put(self, step: int, name: str, number: Tensor) -> None:
        """Keep one more number of a step, beside those that are there."""
        if name not in self._names:
            self._arrange([*self._names, name], self.device or number.device)
        _set(self._row(step, {name})[self._names.index(name)], number)

    @property
    def device(self) -> torch.device | None:
        """Where the numbers are, if there are any."""
        return None if self._values is None else self._values.device

    def _row(self, step: int, names: set[str]) -> Tensor:
        """A step's row, in which those of the numbers are to be written."""
        assert self._values is not None
        place = step % self.length
        if self._held[place][0] != step:
            self._held[place] = step, set()
        self._held[place][1].update(names)
        return self._values[place]

    def _arrange(self, names: list[str], device: torch.device) -> None:
        """Make place for names; what is there stays."""
        values = torch.full((self.length, len(names)), torch.nan, device=device)
        for column, name in enumerate(self._names):
            if self._values is not None:
                values[:, names.index(name)] = self._values[:, column].to(device)
        self._names, self._values = names, values

    def read(self, step: int) -> dict[str, float]:
        """A step's numbers by name, as many as were written. Waits for the device."""
        held, written = self._held[step % self.length]
        if self._values is None or held != step:
            return {}
        numbers = zip(self._names, self._values[step % self.length].tolist(), strict=True)
        return {name: number for name, number in numbers if name in written}

    def clear(self) -> None:
        """Forget everything."""
        self._names, self._values, self._held = [], None, self._nothing()


def _set(place: Tensor, number: Tensor | float) -> None:
    place.copy_(number.detach()) if isinstance(number, Tensor) else place.fill_(number)


def as_record(row: HostRow, numbers: dict[str, float]) -> dict[str, Any]:
    """A step as plain data; what is not known of it is left out."""
    skipped = {name: number for name, number in numbers.items() if name == "skipped"}  # not behind all the layers
    return {"step": row.step, "lr": row.lr, **skipped, **numbers, "samples": row.samples, "seeds": row.seeds}


def texts(rows: deque[HostRow], tokenizer: Any) -> str:
    """The samples whose tokens are kept, newest step first: a line that names each, and what it says."""
    lines = []
    for row in reversed(rows):
        ids = [one for batch in row.tokens for one in batch.tolist()]
        for place, tokens in zip(row.samples, ids, strict=False):
            said = str(tokens) if tokenizer is None else str(tokenizer.decode(tokens))
            lines.append(f"=== step {row.step}, sample {place}\n{said}\n")
    return "\n".join(lines)
