"""Let a GPT write: sequences of token ids, continued."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_stable.callbacks.extra_forward import evaluating, uncompiled
from lit_stable.callbacks.generation import continue_tokens
from lit_stable.model.documents import document_ids
from lit_stable.model.gpt import GPT


def within_documents(gpt: GPT, eot_id: int | None) -> Callable[[Tensor], Tensor]:
    """The model as a function of token ids alone, documents being told by their ends where it has a document mask.

    Args:
        gpt: The model.
        eot_id: What ends a document, unless the model's options say so; ``None``: nothing does.
    """
    own = gpt.config.document_separator
    separator = eot_id if own is None else own
    if not gpt.config.document_mask or separator is None:
        return gpt

    def forward(input_ids: Tensor) -> Tensor:
        logits: Tensor = gpt(input_ids, document_ids(input_ids, separator))
        return logits

    return forward


def generate(
    gpt: GPT,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    eot_id: int | None = None,
) -> list[list[int]]:
    """Continue prompts; the model is left in the mode that it was in, and no generator but its own is used.

    The model sees the last ``max_length`` tokens at most. Compiled blocks run uncompiled here: sequences grow by one
    token each time. Under ``fsdp2`` all ranks call it together and get the same tokens; reshard afterwards
    (`lit_stable.callbacks.extra_forward.reshard`).

    Args:
        gpt: The model, on its device.
        prompts: Token ids, at least one each; they may differ in length.
        new_tokens: Per prompt, >= 0.
        temperature: Divides the logits; 0: the most likely token each time.
        top_k: Draw among so many most likely tokens; ``None``: among all.
        seed: Of the draws; the same seed and prompts give the same tokens.
        stop_id: A continuation ends before the first such token; ``None``: never early.
        eot_id: What ends a document, for a model with a document mask whose options do not say so.

    Returns:
        The continuations alone.

    Raises:
        ValueError: when a prompt is empty, or a number is out of range.
    """
    device = next(gpt.parameters()).device
    with evaluating(gpt), uncompiled():
        new = continue_tokens(
            within_documents(gpt, eot_id),
            prompts,
            new_tokens,
            device=device,
            temperature=temperature,
            top_k=top_k,
            generator=torch.Generator(device).manual_seed(seed),
            max_length=gpt.config.max_length,
        )
    return [_until(ids, stop_id) for ids in new.tolist()]


def _until(ids: list[int], stop_id: int | None) -> list[int]:
    return ids[: ids.index(stop_id)] if stop_id in ids else ids
