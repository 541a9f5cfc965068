"""Documents within a sample: a stream of tokens is cut anywhere, and end-of-document tokens say where each ends."""

from __future__ import annotations

from typing import Any

import torch

from lit_stable.model.config import GPTConfig


def find_separator(config: GPTConfig, data: Any) -> int:
    """The end-of-document token of a run: as the recipe says, else as the data module says (`eot_id`).

    Raises:
        ValueError: when neither does.
    """
    separator = config.document_separator if config.document_separator is not None else getattr(data, "eot_id", None)
    if separator is None:
        raise ValueError(
            f"model.gpt.document_mask=True: {type(data).__name__} names no end-of-document token (eot_id); set"
            " model.gpt.document_separator."
        )
    return int(separator)


def document_ids(input_ids: torch.Tensor, separator: int) -> torch.Tensor:
    """Number of the document that each token of (B, T) belongs to, counted from 0 in each sample, int64 (B, T).

    A separator belongs to the document that it ends. Nothing waits for the device.
    """
    ends = input_ids == separator
    return ends.cumsum(1) - ends.long()


def document_positions(documents: torch.Tensor) -> torch.Tensor:
    """Position of each token within its document, int64 (B, T)."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - (index * first).cummax(1).values


def visible(documents: torch.Tensor | None, length: int, device: torch.device) -> torch.Tensor:
    """Which key (last dimension) each query may see, bool (B or 1, 1, T, T): its past, in its own document."""
    past = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    if documents is None:
        return past
    return past & (documents[:, None, :, None] == documents[:, None, None, :])
