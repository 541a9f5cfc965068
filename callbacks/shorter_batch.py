"""Make the sequences of a batch shorter: drop their tails, or cut them up into more samples."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

# B rows, T positions, L the shorter length, K = T // L pieces per row


def truncate(batch: Any, shape: tuple[int, int], length: int) -> Any:
    """Keep the first ``length`` positions of every (B, T, ...) tensor; others stay as they are."""

    def shorten(tensor: Tensor) -> Tensor:
        return tensor[:, :length].contiguous() if tensor.shape[:2] == shape else tensor  # (B, L, ...)

    return apply_to_collection(batch, Tensor, shorten)


def melt(batch: Any, shape: tuple[int, int], length: int) -> Any:
    """Cut every (B, T, ...) tensor into (B * K, L, ...): the pieces of a row follow each other, T % L at its end go.

    Any other tensor with B rows gets each of them K times, so that rows still belong together.
    """
    rows, total = shape
    pieces = total // length

    def cut(tensor: Tensor) -> Tensor:
        if tensor.shape[:2] == shape:
            return tensor[:, : pieces * length].reshape(rows * pieces, length, *tensor.shape[2:])
        if tensor.ndim and tensor.shape[0] == rows:
            return torch.repeat_interleave(tensor, pieces, dim=0)
        return tensor

    return apply_to_collection(batch, Tensor, cut)
