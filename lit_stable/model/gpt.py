"""The GPT: embeddings, blocks, head.

It knows nothing of devices, sharding or precision plugins. Parameters may be fp32 under autocast, or arrive in bf16
from a sharding wrapper; norms and an fp32 head are right in both cases.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lit_stable.callbacks.extra_forward import is_uncompiled
from lit_stable.model.attention import Attention
from lit_stable.model.attention_context import AttentionContext
from lit_stable.model.attention_kernels import choose_kernel
from lit_stable.model.compute_dtype import compute_dtype
from lit_stable.model.config import GPTConfig
from lit_stable.model.documents import document_positions
from lit_stable.model.gradient_shrink import shrink_gradient
from lit_stable.model.head import Head
from lit_stable.model.laws import idle_overrides
from lit_stable.model.mlp import build_mlp
from lit_stable.model.norm import build_norm, sublayer_norms

# B batch, T tokens, D d_model, V vocabulary


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream, with a norm before it, after it or both.

    A norm that `norm_position` leaves out is the identity. Blocks do not know their index.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.residual_fp32 = config.residual_fp32
        self.attention_norm, self.attention_output_norm = sublayer_norms(config, "attention")
        self.attention = Attention(config)
        self.mlp_norm, self.mlp_output_norm = sublayer_norms(config, "mlp")
        self.mlp = build_mlp(config)
        self.dropout = nn.Dropout(config.dropout_of("residual"))

    def forward(self, x: torch.Tensor, context: AttentionContext, layer: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, T, D), any dtype -> (B, T, D), compute dtype, or fp32 with `residual_fp32`."""
        # Here and not in `residual`: compiled, that would need a second graph where x comes in another dtype (a tied
        # fp32 head under FSDP2).
        dtype = compute_dtype(self.attention.qkv.weight)
        out, _ = self.residual(x.to(torch.float32 if self.residual_fp32 else dtype), context, layer)
        return out

    def residual(
        self, x: torch.Tensor, context: AttentionContext, layer: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (B, T, D) with attention and MLP added to it, in its dtype; and the stream between the two.

        Nobody reads the second. As an output it is in memory anyway, so torch's compiler keeps it for the backward
        pass; else it keeps what attention adds, and sums again. ``None`` where it would have to keep both: what
        attention adds is the input of a norm, or is half as wide as the stream.
        """
        dtype = compute_dtype(self.attention.qkv.weight)
        y = self.attention(self.attention_norm(x).to(dtype), context, layer)
        x = x + self.dropout(self.attention_output_norm(y))
        keeps = x.dtype == dtype and isinstance(self.attention_output_norm, nn.Identity)
        between = x.detach() if keeps else None
        y = self.mlp(self.mlp_norm(x).to(dtype))
        x = x + self.dropout(self.mlp_output_norm(y))
        return x, between


class GPT(nn.Module):
    """A decoder-only transformer. Weights mean nothing until `lit_stable.model.init.initialise` has filled them.

    Raises:
        ValueError: when a pattern of `init_overrides` matches none of its matrices.

    Attributes:
        embed_gradient: Share of its gradient that the token embedding gets while training; set by whoever knows the
            step, a 0-d tensor where a compiled graph must not depend on the value.
        blocks_compiled: Whether the blocks are compiled, which decides what attention runs on.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_gradient: torch.Tensor | float = config.embed_gradient(0)
        self.blocks_compiled = False
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_norm = build_norm(config.norm, config.d_model, config) if config.has_embed_norm else None
        self.wpe = nn.Embedding(config.max_length, config.d_model) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout_of("embed"))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = build_norm(config.norm, config.d_model, config)
        self.head = Head(config)
        self.tie()
        if problems := idle_overrides(self, config):
            raise ValueError("\n".join(problems))

    def tie(self) -> None:
        """With `tied`, make the head's weight the token embedding again: `to_empty` gives each its own storage."""
        if self.config.tied:
            self.head.weight = self.wte.weight

    def forward(
        self, input_ids: torch.Tensor, documents: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Token ids (B, T) -> logits (B, T, V), fp32 with `head_fp32`, else in the compute dtype.

        Args:
            input_ids: Token ids (B, T).
            documents: Document of each token, (B, T), as `document_ids` numbers them: tokens see no other than their
                own. ``None``: each sample is one document.
            labels: (B, T), -100 where nothing is predicted: return their cross-entropies (B, T) in fp32 instead, where
                the head makes both in one go; elsewhere it returns logits all the same.
        """
        hidden = self.trunk(input_ids, documents)  # (B, T, D)
        answer: torch.Tensor = self.head(hidden, labels=labels)  # (B, T, V) or (B, T)
        return answer

    def trunk(self, input_ids: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids (B, T) -> final normed residual stream (B, T, D)."""
        context = self.attention_context(input_ids.shape[1], documents, input_ids.device)
        return self.compute(self.enter(input_ids, documents), context)

    def compute(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Residual stream before the first block (B, T, D) -> behind the last norm: all that is compiled as a whole.

        The head stays out of it: in training on CUDA it is one autograd node, with kernels of its own.
        """
        for index, block in enumerate(self.blocks):
            x = block(x, context, context.layer(index))
        normed: torch.Tensor = self.norm(x)
        return normed

    def enter(self, input_ids: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids (B, T) -> residual stream before the first block (B, T, D).

        In the compute dtype, or fp32 with `residual_fp32`; where a sharding wrapper keeps the embedding wider than the
        blocks (a tied fp32 head), in the embedding's, and blocks round it.
        """
        dtype = torch.float32 if self.config.residual_fp32 else compute_dtype(self.wte.weight)
        return self.embed(input_ids, documents).to(dtype)

    def embed(self, input_ids: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids (B, T) -> residual stream before the first block (B, T, D), in the embedding's dtype."""
        config = self.config
        x: torch.Tensor = self.wte(input_ids)
        if config.embed_grad_shrink is not None and self.training:
            x = shrink_gradient(x, self.embed_gradient)
        if config.embed_scale != 1:
            x = x * (math.sqrt(config.d_model) if config.embed_scale == "sqrt_d" else config.embed_scale)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.wpe is not None:
            positions = torch.arange(x.shape[1], device=x.device)  # (T,), for the whole batch
            if documents is not None and config.reset_positions:
                positions = document_positions(documents)  # (B, T)
            x = x + self.wpe(positions)
        x = self.dropout(x)
        return x

    def attention_context(self, length: int, documents: torch.Tensor | None, device: torch.device) -> AttentionContext:
        """What the attention of all blocks shares in a forward pass over ``length`` tokens.

        Raises:
            ValueError: when ``length`` is above `max_length`.
        """
        if length > self.config.max_length:
            longest = f"model.gpt.max_length={self.config.max_length}"
            raise ValueError(f"A sequence of {length} tokens: {longest} is the longest.")
        dropouts: list[nn.Dropout] = [block.attention.dropout for block in self.blocks]  # type: ignore[union-attr, misc]
        drops = self.training and any(dropout.p > 0 for dropout in dropouts)
        kernel = choose_kernel(
            self.config,
            documents=documents is not None,
            device_type=device.type,
            compiled=self.blocks_compiled and not is_uncompiled(),
            drops=drops,
        )
        return AttentionContext(self.config, length, documents, kernel, device)
