"""What monitors of parameters should log, from whole tensors and with nothing but the definitions."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_stable.callbacks.parameter_places import component_of, layer_of


def whole(tensor: Tensor) -> Tensor:
    """(...) gathered, fp64."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().clone()


def groups(names: list[str]) -> dict[str, list[str]]:
    """Names by the suffix under which they are logged together."""
    found: dict[str, list[str]] = {"": names}
    for name in names:
        for label in (f"_layer/{layer_of(name)}", f"_component/{component_of(name)}", f"_tensor/{name}"):
            found.setdefault(label, []).append(name)
    return found


def rms(tensors: list[Tensor]) -> float:
    flat = torch.cat([t.flatten() for t in tensors])
    return math.sqrt(float(flat.square().sum()) / len(flat))


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


class ByHand(Callback):
    """Keeps, for the last step, what the monitors of weights, gradients, updates and moments should have logged."""

    def __init__(self, per_tensor: bool = True) -> None:
        self.expected: dict[str, float] = {}
        self._before: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        named = dict(pl_module.named_parameters())
        self._before = {name: whole(p) for name, p in named.items()}
        gradients = {name: whole(p.grad) if p.grad is not None else torch.zeros(1) for name, p in named.items()}
        self.expected = {}
        for name, weight in self._before.items():
            kind = "norm_gain" if "norm" in name and not name.endswith("bias") else "weight_rms"
            self.expected[f"stability/{kind}/{name}"] = rms([weight])
        for label, names in groups(list(named)).items():
            self.expected[f"stability/grad_norm{label}"] = norm([gradients[n] for n in names])
        tables = [g for n, g in gradients.items() if n.split(".")[-2] in ("wte", "wpe")]
        self.expected["stability/embedding_grad_share"] = norm(tables) / norm(list(gradients.values()))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self._before:
            return
        named = dict(pl_module.named_parameters())
        moved = {name: whole(p) - self._before[name] for name, p in named.items()}
        optimizer = trainer.optimizers[0]
        (group,) = {(*g["betas"], g["eps"]) for g in optimizer.param_groups}
        beta1, beta2, eps = group
        first, second = {}, {}
        for name, p in named.items():
            state = optimizer.state[p]
            step = int(state["step"])
            first[name] = whole(state["exp_avg"]) / (1 - beta1**step)
            second[name] = whole(state["exp_avg_sq"]) / (1 - beta2**step)
        for label, names in groups(list(named)).items():
            updates, weights = [moved[n] for n in names], [self._before[n] for n in names]
            self.expected[f"stability/update_rms{label}"] = rms(updates)
            self.expected[f"stability/update_ratio{label}"] = norm(updates) / norm(weights) if norm(weights) else 0.0
            roots = torch.cat([second[n].flatten() for n in names]).sqrt()
            self.expected[f"stability/adam_first_moment{label}"] = rms([first[n] for n in names])
            self.expected[f"stability/adam_grad_rms{label}"] = rms([roots])
            self.expected[f"stability/adam_grad_rms_over_eps{label}"] = rms([roots]) / eps
            self.expected[f"stability/adam_below_eps{label}"] = float((roots < eps).double().mean())
        self._before = {}


def differences(expected: dict[str, float], logged: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """By name, (expected, logged) of what is missing or off by more than fp32 sums explain."""
    wrong = {}
    for name, value in expected.items():
        found = float(logged.get(name, math.nan))
        if not math.isclose(value, found, rel_tol=2e-5, abs_tol=1e-9):
            wrong[name] = (value, found)
    return wrong
