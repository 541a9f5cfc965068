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


def expected_of(config: GPTConfig, weights: dict[str, Tensor], ids: Tensor) -> dict[str, float]:
    """Metrics by name, of tokens (B, T)."""
    gpt = GPT(config).eval()
    gpt.load_state_dict(weights, strict=False)  # a tied head has no name of its own
    found: dict[str, float] = {}

    def note(key: str, x: Tensor) -> None:
        found[f"stability/activation_rms/{key}"] = float(x.double().square().mean().sqrt())
        found[f"stability/activation_max/{key}"] = float(x.abs().max())

    with torch.no_grad():
        x = gpt.embed(ids)
        rope = (
            Rotary(ids.shape[1], config.head_size, config.rope_theta, x.device) if config.position == "rope" else None
        )
        for index, block in enumerate(gpt.blocks):
            layer = f"gpt.blocks.{index}"
            normed = block.attention_norm(x)
            q, k, v = block.attention.qkv(normed).unflatten(-1, (-1, 3, config.head_size)).unbind(-2)
            for role, part in zip("qkv", (q, k, v), strict=True):
                note(f"{layer}.{role}", part)
            q, k = block.attention.q_norm(q), block.attention.k_norm(k)
            if rope is not None:
                q, k = rope.rotate(q), rope.rotate(k)
            logits = torch.einsum("bihk,bjhk->bhij", q.double(), k.double()) / math.sqrt(config.head_size)
            weights_shape = logits.shape[-2:]
            seen = torch.ones(weights_shape, dtype=torch.bool).tril()
            logits = logits.masked_fill(~seen, -math.inf)
            found[f"stability/attention_logit_max/{layer}.attention"] = float(logits.max())
            mixed = torch.einsum("bhij,bjhk->bihk", logits.softmax(-1).float(), v).flatten(2)
            out = block.attention.out(mixed)
            note(f"{layer}.o", out)
            x = x + out
            inside = block.mlp_norm(x)
            note(f"{layer}.fc1", block.mlp.up(inside))
            if hasattr(block.mlp, "gate"):
                note(f"{layer}.gate", block.mlp.gate(inside))
            out = block.mlp(inside)
            note(f"{layer}.fc2", out)
            x = x + out
            note(f"{layer}.residual", x)
        output = gpt.head(gpt.norm(x)).double()
    log_z = output.logsumexp(-1)
    found["stability/attention_logit_max"] = max(v for k, v in found.items() if "attention_logit" in k)
    found["stability/log_z"] = float(log_z.mean())
    found["stability/log_z_rms"] = float(log_z.square().mean().sqrt())
    found["stability/output_logit_max"] = float(output.abs().max())
    return found
