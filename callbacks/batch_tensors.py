"""The tensors in a batch of any make, and how many samples and tokens they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from .base import MisconfigurationException

# B rows, T positions


def tensors(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a tensor, or in tuples, lists, mappings and dataclasses of them, nested at will, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors(part)
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from tensors(part)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from tensors(getattr(batch, field.name))


def batch_shape(batch: Any) -> tuple[int, int] | None:
    """(B, T) of the first tensor with two or more dimensions; None: there is none."""
    return next(((t.shape[0], t.shape[1]) for t in tensors(batch) if t.ndim > 1), None)


def samples_and_tokens(batch: Any) -> tuple[int, int]:
    """(B, B * T) of a batch; where no tensor has two dimensions, T counts as 1 and the first with one has B rows.

    Raises:
        MisconfigurationException: when the batch holds no tensor.
    """
    if shape := batch_shape(batch):
        return shape[0], shape[0] * shape[1]
    rows = [tensor.shape[0] if tensor.ndim else 1 for tensor in tensors(batch)]
    if not rows:
        raise MisconfigurationException(
            f"batch of type {type(batch).__name__}: holds no tensor to count samples by; define"
            " `count_batch(batch) -> (samples, tokens)` on the LightningModule."
        )
    return rows[0], rows[0]
