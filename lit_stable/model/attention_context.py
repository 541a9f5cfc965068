"""What all attention layers of one forward pass share: rotary phases, and what each token sees."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lit_stable.model.alibi import alibi_bias, alibi_slopes
from lit_stable.model.attention_kernels import Kernel, Past
from lit_stable.model.config import GPTConfig
from lit_stable.model.documents import visible
from lit_stable.model.rotary import Rotary

# B batch, T tokens, H query heads


class AttentionContext:
    """Made once per forward pass and handed to every block.

    A plain object on purpose. Sharding wrappers look for tensors in the tuples, dicts and dataclasses among a block's
    inputs and round what they find to the compute dtype.

    Args:
        config: The model.
        length: Number of tokens T.
        documents: Document of each token, (B, T); ``None``: each sample is one.
        kernel: As `choose_kernel` says.
        device: Where the tokens are.
    """

    def __init__(
        self, config: GPTConfig, length: int, documents: torch.Tensor | None, kernel: Kernel, device: torch.device
    ) -> None:
        rotates = config.position == "rope"
        self.rope = Rotary(length, config.head_size, config.rope_theta, device) if rotates else None
        self.past = _past(config, length, documents, kernel, device)
        counted = config.qk_layer_scaling != "none"
        numbers = torch.arange(1, config.n_layer + 1, device=device, dtype=torch.float32) if counted else None
        self._layers = None if numbers is None else numbers.unbind()

    def layer(self, index: int) -> torch.Tensor | None:
        """Number of a layer, counted from 1, as a 0-d tensor, so that one compiled block serves all; or ``None``."""
        return None if self._layers is None else self._layers[index]


def _past(config: GPTConfig, length: int, documents: torch.Tensor | None, kernel: Kernel, device: torch.device) -> Past:
    if kernel == "sdpa":
        return Past(kernel)
    slopes = alibi_slopes(config.n_head, device) if config.position == "alibi" else None
    if kernel == "flex":
        return Past(kernel, blocks=_blocks(length, documents, device), slopes=slopes)
    mask = visible(documents, length, device)
    if slopes is not None:
        mask = alibi_bias(slopes, length).masked_fill(~mask, -torch.inf)  # (B or 1, H, T, T)
    return Past(kernel, mask=mask)


def _blocks(length: int, documents: torch.Tensor | None, device: torch.device) -> BlockMask:
    if documents is None:
        return _causal_blocks(length, device)

    def see(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    blocks: BlockMask = _compiled_create()(see, documents.shape[0], None, length, length, device=device)
    return blocks


@lru_cache(maxsize=8)
def _causal_blocks(length: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda batch, head, query, key: query >= key, None, None, length, length, device=device)


@lru_cache(maxsize=1)
def _compiled_create() -> Any:
    # Uncompiled it writes out all (B, T, T) comparisons.
    return torch.compile(create_block_mask)
