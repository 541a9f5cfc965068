"""A project's own data and network, in torch alone: what Lightning is used for in the other files stands there."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LENGTH, BATCH = 32, 16
BROKEN = 330  # the record in the training data whose weight is no number, as real data have one somewhere


class Records(Dataset[dict[str, Tensor]]):
    """Windows of a text of the standard library, as bytes (LENGTH + 1,), each with the weight of its loss."""

    def __init__(self, start: float, stop: float, broken: int | None = None) -> None:
        text = torch.tensor(list(Path(textwrap.__file__).read_bytes()))
        windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        self.windows = windows[int(start * len(windows)) : int(stop * len(windows))]
        self.broken = broken

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        weight = float("nan") if index == self.broken else 1.0
        return {"bytes": self.windows[index], "weight": torch.tensor(weight)}


def training() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Records(0.0, 0.9, BROKEN), batch_size=BATCH)


def validation() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Records(0.9, 1.0), batch_size=BATCH)


class Network(nn.Module):
    """The next byte from those before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs, targets = batch["bytes"][:, :-1], batch["bytes"][:, 1:]  # (B, LENGTH)
        logits = self.head(self.norm(self.memory(self.embedding(inputs))[0]))  # (B, LENGTH, 256)
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (losses.mean(1) * batch["weight"]).mean()
