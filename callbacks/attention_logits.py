"""The largest attention logit, which no fused kernel shows, and where to find the queries and keys behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ELEMENTS = 1 << 26  # of logits at a time: 256 MiB
_BLOCKS = 8  # into which the queries are cut at least: of causal attention 44 % need no product


@runtime_checkable
class ShowsQueriesKeys(Protocol):
    """An attention module that says what its logits are made of.

    Needed only where attention does not go through ``torch.nn.functional.scaled_dot_product_attention``, whose calls
    are seen by themselves: for FlexAttention, other kernels, a softmax written out. Causal attention is assumed.
    """

    def queries_keys(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Given the arguments of ``forward``: final queries (B, H, T, K), final keys (B, G, S, K), and their factor.

        Final: after norms, rotary phases and whatever else stands before the product; G divides H. The logit is the
        product times the factor, before a soft cap. A fourth value, if there is one, is a mask as
        ``scaled_dot_product_attention`` takes it, or ``None``: what else is hidden, and a bias such as ALiBi's.
        """


def largest_logits(
    q: Tensor, k: Tensor, scale: float | None = None, is_causal: bool = True, mask: Tensor | None = None
) -> Tensor:
    """Each head's largest logit among the pairs that attend to each other, (H,) fp32; products and sums in fp32.

    Args:
        q: Queries (B, H, T, K).
        k: Keys (B, G, S, K); each serves H / G heads.
        scale: Factor of the products; ``None``: K^-1/2.
        is_causal: Whether query i sees keys 0 to i only.
        mask: As ``scaled_dot_product_attention`` takes it: where False nothing attends, or numbers to add.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    (batch, heads, length, _), seen = q.shape, k.shape[-2]
    rows = max(1, min(-(-length // _BLOCKS), _ELEMENTS // max(1, heads * seen)))  # queries at a time
    samples = max(1, _ELEMENTS // max(1, heads * rows * seen))
    whole_mask = None if mask is None else mask.expand(batch, heads, length, seen)
    largest = torch.full((heads,), -math.inf, dtype=torch.float32, device=q.device)
    with torch.autocast(q.device.type, enabled=False):  # in which the products would be rounded to 16 bits
        for part in (slice(first, first + samples) for first in range(0, batch, samples)):
            keys = _in_fp32(k[part]).flatten(0, 1)  # (B G, S, K)
            for start in range(0, length, rows):
                # What lies behind a block's last query is not computed, and of the rest only a corner is hidden.
                last = min(start + rows, seen) if is_causal else seen
                queries = _in_fp32(q[part, :, start : start + rows])
                logits = _products(queries, keys[:, :last], scale)  # (B, H, R, S)
                if is_causal and last > start:
                    _hide_future(logits[..., start:])
                if whole_mask is not None:
                    _apply_mask(logits, whole_mask[part, :, start : start + rows, :last])
                largest = torch.maximum(largest, logits.amax((0, 2, 3)))
    return largest


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)  # one copy, where two would follow


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(B, H, R, K) queries, (B G, S, K) keys -> (B, H, R, S)."""
    queries = q.reshape(k.shape[0], -1, q.shape[-1])  # heads that share a key stand one below the other
    product = torch.baddbmm(q.new_empty(()), queries, k.transpose(1, 2), beta=0, alpha=scale)  # the first is not read
    return product.view(*q.shape[:3], -1)


def _hide_future(logits: Tensor) -> None:
    """In place, of (..., R, S) whose first query and first key stand at the same position."""
    logits.masked_fill_(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -math.inf)


def _apply_mask(logits: Tensor, mask: Tensor) -> None:
    """In place; the mask has the shape of the logits."""
    if mask.dtype == torch.bool:
        logits.masked_fill_(~mask, -math.inf)
    else:
        logits.add_(mask)


class AttentionCalls(TorchFunctionMode):
    """While active, hands the queries and keys of every ``scaled_dot_product_attention`` to a function, unchanged.

    Args:
        note: Called with (q, k, scale, is_causal, mask), whose shapes are those of :func:`largest_logits`.
    """

    def __init__(self, note: Callable[[Tensor, Tensor, float | None, bool, Tensor | None], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            self._note(
                given["query"],
                given["key"],
                given.get("scale"),
                given.get("is_causal", False),
                given.get("attn_mask"),
            )
        return func(*args, **kwargs)
