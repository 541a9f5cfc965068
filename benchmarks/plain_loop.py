"""What lit-stable is compared with: a GPT and a training loop in plain torch, compiled whole, and LitGPT's model.

Both train on random tokens that lie on the device: no data path, no logging, no checkpoints, no check of anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import now

UNCOUNTED = 2  # steps of a turn


class Shape(NamedTuple):
    """A model and a step of it, as the recipes have them: layer norm without biases, exact GELU, tied head, learned
    positions."""

    n_layer: int
    n_head: int
    d_model: int
    length: int
    micro_batch: int
    vocab_size: int = 50304


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.d_model
        self.heads = shape.n_head
        self.norm1, self.norm2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d = x.shape
        q, k, v = (
            y.view(batch, length, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(d, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(shape.vocab_size, shape.d_model), nn.Embedding(shape.length, shape.d_model)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.d_model, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PlainLoop:
    """Trains a few steps whenever it is its turn: fused AdamW, clipping to 1.0; weights in fp32 under autocast to bf16,
    or all in another dtype."""

    def __init__(
        self,
        shape: Shape,
        model: nn.Module,
        loss: Callable[[Any, Tensor, Tensor], Tensor],
        counted: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device, dtype)
        self.mixed = dtype == torch.float32
        self.compiled: Any = torch.compile(self.model) if self.device == "cuda" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.loss, self.counted = loss, counted
        size = (shape.micro_batch, shape.length + 1)
        self.tokens = torch.randint(shape.vocab_size, size, device=self.device)

    def step(self) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.mixed):
            loss = self.loss(self.compiled, self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def turn(self) -> float:
        """Seconds per step, behind those that do not count."""
        for _ in range(UNCOUNTED):
            self.step()
        since = now()
        for _ in range(self.counted):
            self.step()
        return (now() - since) / self.counted


def plain(shape: Shape, counted: int) -> PlainLoop:
    return PlainLoop(shape, PlainGPT(shape), lambda model, ids, labels: model(ids, labels), counted)


def litgpt(shape: Shape, counted: int, dtype: torch.dtype = torch.float32) -> PlainLoop:
    """LitGPT's model and loss in the same loop: GPT-NeoX's blocks, rotary positions, an untied head.

    Args:
        dtype: Of its weights; in bf16 their moments and gradients are bf16 too, half the memory of ours and coarser.

    Raises:
        ImportError: where it is not installed.
    """
    from litgpt.model import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    size = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.d_model, "block_size": shape.length}
    config = Config(**size, vocab_size=shape.vocab_size, padded_vocab_size=shape.vocab_size, bias=False)

    def loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = chunked_cross_entropy(model(ids), labels, chunk_size=0)
        return found

    return PlainLoop(shape, GPT(config), loss, counted, dtype)
