"""Continue sequences of tokens, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# P prompts, L longest sequence, W what the model sees at once, V vocabulary


@torch.no_grad()
def continue_tokens(
    forward: Callable[[Tensor], Any],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    device: torch.device,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Continue every prompt by ``new_tokens`` tokens.

    Prompts of different lengths run side by side, filled up on the right: a causal model's logits do not depend on
    what comes later, so the filling changes nothing. The number of forward passes is ``new_tokens`` whatever is drawn:
    ranks of a sharded model make the same calls. Nothing is cached between them. Nothing waits for the device.

    Args:
        forward: Token ids (P, W) -> logits (P, W, V), or an object with ``logits``. Causal; without dropout.
        prompts: Token ids, at least one each.
        new_tokens: >= 0.
        device: Where the model is.
        temperature: Divides the logits; 0: the most likely token each time.
        top_k: Draw among so many most likely tokens; ``None``: among all.
        generator: On ``device``; ``None``: torch's own.
        max_length: The model sees at most so many tokens: the latest ones. ``None``: all.

    Returns:
        The new tokens alone, (P, new_tokens) int64, on the device.

    Raises:
        ValueError: when a prompt is empty, or a number is out of range.
    """
    check_sampling(prompts, new_tokens, temperature, top_k)
    begin = torch.tensor([len(prompt) for prompt in prompts])  # on the host: nobody waits for it
    ids = torch.zeros(len(prompts), int(begin.max()) + new_tokens, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt)
    ids, lengths = ids.to(device), begin.to(device)  # (P, L), (P,)
    rows = torch.arange(len(prompts), device=device)
    for count in range(new_tokens):
        width = min(int(begin.max()) + count, max_length or ids.shape[1])
        start = (lengths - width).clamp_min(0)
        seen = ids.gather(1, start[:, None] + torch.arange(width, device=device))  # (P, W)
        logits = forward(seen)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        ids[rows, lengths] = _choose(logits[rows, lengths - start - 1].float(), temperature, top_k, generator)
        lengths = lengths + 1
    return ids.gather(1, begin.to(device)[:, None] + torch.arange(new_tokens, device=device))


_MOST = 100_000_000  # tokens, in int64
_COLDEST = 1e-30  # temperature; in fp32 logits of up to 1e8 can be divided by it


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """(P, V) -> (P,)"""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def check_sampling(prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, top_k: int | None) -> None:
    """Raise ValueError with everything that is out of range."""
    problems = [] if len(prompts) else ["prompts=[]: give at least one."]
    problems += [f"prompts[{i}] is empty; give at least one token." for i, p in enumerate(prompts) if not len(p)]
    if new_tokens < 0:
        problems.append(f"new_tokens={new_tokens}: must be 0 or more.")
    if new_tokens > _MOST:
        problems.append(f"new_tokens={new_tokens}: must be at most {_MOST:,}, so many as are held in memory.")
    if not 0 <= temperature < float("inf"):
        problems.append(f"temperature={temperature}: must be 0 or more.")
    if 0 < temperature < _COLDEST:
        problems.append(f"temperature={temperature}: logits divided by it overflow; give 0 for the most likely token.")
    if top_k is not None and top_k < 1:
        problems.append(f"top_k={top_k}: must be at least 1.")
    if problems:
        raise ValueError("\n".join(problems))
