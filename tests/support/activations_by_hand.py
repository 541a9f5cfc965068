"""What monitors of activations should log, from whole weights and all ranks' tokens, by a plain forward pass."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.rotary import Rotary


class LastBatch(Callback):
    """Keeps the last micro-batch of all ranks before a step, and the weights that the step begins with."""

    def __init__(self) -> None:
        self.ids = torch.empty(0)
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        ids = batch["input_ids"]
        if dist.is_initialized():
            parts = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, ids)
            ids = torch.cat(parts)
        self.ids = ids

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        named = pl_module.gpt.named_parameters()  # type: ignore[union-attr]
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named}
        self.weights = {name: p.detach().clone() for name, p in whole.items()}


def documents_by_hand(ids: Tensor, separator: int | None) -> Tensor:
    """Number of each token's document within its sample: one more after every separator."""
    numbers = [[row[:i].count(separator) for i in range(len(row))] for row in ids.tolist()]
    return torch.tensor(numbers)


def seen_by_hand(ids: Tensor, documents: Tensor | None) -> Tensor:
    """Which key each query sees, (B, 1, T, T)."""
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril().expand(len(ids), 1, -1, -1)
    return seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])


def alibi_by_hand(config: GPTConfig, length: int) -> Tensor:
    """(H, T, T), of a number of heads that is a power of two; zeros without ALiBi."""
    slopes = [2 ** (-8 * (head + 1) / config.n_head) for head in range(config.n_head)]
    distances = torch.arange(length)[None, :] - torch.arange(length)[:, None]  # key minus query
    bias = torch.tensor(slopes)[:, None, None] * distances
    return bias.double() if config.position == "alibi" else torch.zeros_like(bias)


def expected_of(config: GPTConfig, weights: dict[str, Tensor], ids: Tensor) -> dict[str, float]:
    """Metrics by name, of tokens (B, T)."""
    gpt = GPT(config).eval()
    gpt.load_state_dict(weights, strict=False)  # a tied head has no name of its own
    found: dict[str, float] = {}

    def note(key: str, x: Tensor) -> None:
        found[f"stability/activation_rms/{key}"] = float(x.double().square().mean().sqrt())
        found[f"stability/activation_max/{key}"] = float(x.abs().max())

    with torch.no_grad():
        documents = documents_by_hand(ids, config.document_separator) if config.document_mask else None
        x = gpt.embed(ids, documents)
        rope = (
            Rotary(ids.shape[1], config.head_size, config.rope_theta, x.device) if config.position == "rope" else None
        )
        seen = seen_by_hand(ids, documents)
        for index, block in enumerate(gpt.blocks):
            layer = f"gpt.blocks.{index}"
            normed = block.attention_norm(x)
            queries = config.n_head // config.kv_heads
            rows = block.attention.qkv(normed).unflatten(-1, (config.kv_heads, queries + 2, config.head_size))
            q, k, v = rows[..., :queries, :].flatten(2, 3), rows[..., queries, :], rows[..., queries + 1, :]
            for role, part in zip("qkv", (q, k, v), strict=True):
                note(f"{layer}.{role}", part)
            q, k = block.attention.qk_scale(block.attention.q_norm(q)), block.attention.k_norm(k)
            if rope is not None:
                q, k = rope.rotate(q), rope.rotate(k)
            k, v = (heads.repeat_interleave(queries, dim=2) for heads in (k, v))
            logits = torch.einsum("bihk,bjhk->bhij", q.double(), k.double())
            logits = logits if config.qk_norm == "l2" else logits / math.sqrt(config.head_size)
            logits = logits / (index + 1) if config.qk_layer_scaling == "hf_inverse_layer" else logits
            logits = (logits + alibi_by_hand(config, ids.shape[1])).masked_fill(~seen, -math.inf)
            found[f"stability/attention_logit_max/{layer}.attention"] = float(logits.max())
            cap = config.attention_soft_cap
            weights_of = (logits if cap is None else cap * torch.tanh(logits / cap)).masked_fill(~seen, -math.inf)
            mixed = torch.einsum("bhij,bjhk->bihk", weights_of.softmax(-1).float(), v)
            out = block.attention.out(block.attention.head_scale(mixed).flatten(2))
            note(f"{layer}.o", out)
            x = x + block.attention_output_norm(out)
            inside = block.mlp_norm(x)
            note(f"{layer}.fc1", block.mlp.up(inside))
            if hasattr(block.mlp, "gate"):
                note(f"{layer}.gate", block.mlp.gate(inside))
            out = block.mlp(inside)
            note(f"{layer}.fc2", out)
            x = x + block.mlp_output_norm(out)
            note(f"{layer}.residual", x)
        output = gpt.head(gpt.norm(x)).double()
    log_z = output.logsumexp(-1)
    found["stability/attention_logit_max"] = max(v for k, v in found.items() if "attention_logit" in k)
    found["stability/log_z"] = float(log_z.mean())
    found["stability/log_z_rms"] = float(log_z.square().mean().sqrt())
    found["stability/output_logit_max"] = float(output.abs().max())
    return found
