"""StableAdamW written out, and the gradients that it is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_stable.callbacks.adam_update import AdamUpdate

SHAPES = [(5, 7), (7,), (3, 2, 4), ()]


def weights(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def gradients(steps: int, dtype: torch.dtype = torch.float32) -> Iterator[list[Tensor]]:
    """Gradients whose size jumps now and then, in one tensor or in all."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        row = [torch.randn(shape, generator=generator) for shape in SHAPES]
        scale = [0.1 * (30.0 if step % 10 == 5 or (step % 7 == 3 and i == 1) else 1.0) for i in range(len(SHAPES))]
        yield [(g * s).to(dtype) for g, s in zip(row, scale, strict=True)]


def stable_adam(options: dict[str, Any], decoupled: bool, steps: int, lr: float, threshold: float) -> list[Tensor]:
    """StableAdamW (Wortsman et al. 2023, algorithm 2), or Adam with the same rule, in fp64 and step by step."""
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    eps, decay = options.get("eps", 1e-8), options.get("weight_decay", 0.01 if decoupled else 0.0)
    found = [w.detach().double() for w in weights()]
    first, second, largest = ([torch.zeros_like(w) for w in found] for _ in range(3))
    for t, row in enumerate(gradients(steps), start=1):
        for i, given in enumerate(row):
            g = given.double() * (-1 if options.get("maximize") else 1)
            if decoupled:
                found[i] = found[i] * (1 - lr * decay)
            else:
                g = g + decay * found[i]
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g**2
            largest[i] = torch.maximum(largest[i], second[i])
            v = (largest[i] if options.get("amsgrad") else second[i]) / (1 - beta2**t)
            rms = (g**2 / v.clamp(min=eps**2)).mean().sqrt()
            rate = lr / max(1.0, rms.item() / threshold)
            found[i] = found[i] - rate * first[i] / (1 - beta1**t) / (v.sqrt() + eps)
    return found


def clipped(optimizer: Any, update: AdamUpdate, row: list[Tensor], threshold: float) -> int:
    """One step with its updates clipped; how many tensors were."""
    for parameter, gradient in zip(update._parameters, row, strict=True):
        parameter.grad = gradient.clone().to(parameter.device)
    optimizer.step()
    rms = update.rms()
    update.take_back(torch.where(rms > threshold, 1 - threshold / rms, 0.0))
    return int((rms > threshold).sum())
