"""The GPT: embeddings, pre-norm blocks, head.

It knows nothing of devices, sharding or precision plugins. Parameters may be fp32 under autocast, or arrive in bf16
from a sharding wrapper; norms and an fp32 head are right in both cases.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lit_stable.model.attention import Attention
from lit_stable.model.config import GPTConfig
from lit_stable.model.mlp import MLPS
from lit_stable.model.norm import build_norm
from lit_stable.model.rotary import Rotary

# B batch, T tokens, D d_model, V vocabulary


class Block(nn.Module):
    """Attention, then MLP, each on the normed residual stream and added back to it. Blocks do not know their index."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config.norm, config.d_model, config)
        self.attention = Attention(config)
        self.mlp_norm = build_norm(config.norm, config.d_model, config)
        self.mlp = MLPS[config.mlp](config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, rope: Rotary | None) -> torch.Tensor:
        """x (B, T, D), any dtype -> (B, T, D), compute dtype."""
        # Not in `residual`, which may be compiled: it would be once more, for the dtype that the embeddings have.
        return self.residual(x.to(_compute_dtype(self.attention.qkv.weight)), rope)

    def residual(self, x: torch.Tensor, rope: Rotary | None) -> torch.Tensor:
        """x (B, T, D) with attention and MLP added to it, all in the compute dtype."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rope))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Head(nn.Linear):
    """Logits of the next token, hidden (B, T, D) -> (B, T, V); with `head_fp32` products and result are fp32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.fp32 = config.head_fp32

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.fp32:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float())


class GPT(nn.Module):
    """A decoder-only transformer. Weights mean nothing until `lit_stable.model.init.initialise` has filled them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_norm = build_norm(config.norm, config.d_model, config) if config.embed_norm else None
        self.wpe = nn.Embedding(config.max_length, config.d_model) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = build_norm(config.norm, config.d_model, config)
        self.head = Head(config)
        self.tie()

    def tie(self) -> None:
        """With `tied`, make the head's weight the token embedding again: `to_empty` gives each its own storage."""
        if self.config.tied:
            self.head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> logits (B, T, V), fp32 with `head_fp32`, else in the compute dtype."""
        return self.head_logits(self.trunk(input_ids))

    def trunk(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> final normed residual stream (B, T, D).

        Raises:
            ValueError: when T is above `max_length`.
        """
        length, config = input_ids.shape[1], self.config
        if length > config.max_length:
            raise ValueError(f"A sequence of {length} tokens: model.gpt.max_length={config.max_length} is the longest.")
        x: torch.Tensor = self.embed(input_ids)  # (B, T, D)
        rope = None
        if config.position == "rope":
            rope = Rotary(length, config.head_size, config.rope_theta, x.device)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x)
        return x

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> residual stream before the first block (B, T, D), in the embedding's dtype."""
        x: torch.Tensor = self.wte(input_ids)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))  # (T, D) over the batch
        x = self.dropout(x)
        return x

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final residual stream (B, T, D) -> logits (B, T, V)."""
        logits: torch.Tensor = self.head(hidden)
        return logits


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    # Asked inside the block: there a sharding wrapper has put the weights it will multiply with.
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
