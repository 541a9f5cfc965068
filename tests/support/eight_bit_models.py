"""Parameters of every kind that 8-bit Adam meets, gradients for any number of ranks, short fits and whole states."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from tiny_fit import TinyData, TinyModule, quiet_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lit_stable.callbacks import EightBitAdam
from lit_stable.callbacks.eight_bit_blocks import require_bitsandbytes
from lit_stable.callbacks.eight_bit_conversion import convert_in_place
from lit_stable.callbacks.eight_bit_layout import StateRules, plan_states
from lit_stable.callbacks.eight_bit_optimizer import StatePlan

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Kinds(nn.Module):
    """Rows of whole blocks, of many and of odd lengths; too few rows for every rank; three dimensions; 32-bit ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 32)
        self.even = nn.Linear(512, 64)
        self.odd = nn.Linear(600, 37, bias=False)
        self.short = nn.Linear(97, 10, bias=False)
        self.one = nn.Linear(300, 1, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 20, 30))
        self.norm = nn.LayerNorm(32)
        self.tied = nn.Linear(32, 40, bias=False)
        self.tied.weight = self.embedding.weight


class OneRow(LightningModule):
    """A row of weights; the first has gradients of 1 for ever, the others one of ``small`` and none thereafter."""

    def __init__(self, small: float) -> None:
        super().__init__()
        self.net, self.small = nn.Linear(256, 1, bias=False), small
        self.after: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.after.append(self.net.weight.detach().clone())
        gradient = torch.full_like(self.net.weight, self.small if batch_idx == 0 else 0.0)
        gradient[0, 0] = 1.0
        loss: Tensor = (self.net.weight * gradient).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


EIGHT_BIT = ["experts", "even.weight", "odd.weight", "short.weight", "one.weight"]


def planned(module: nn.Module, state_map: Any = "dynamic", converts: bool = False, **rules: Any) -> StatePlan:
    """What is kept how, with tensors of any size in 8 bit."""
    return StatePlan(plan_states(module, StateRules(**{"min_8bit_size": 1, **rules})), state_map, converts)


def converted(model: nn.Module, cls: Any = torch.optim.AdamW, plan: StatePlan | None = None, **options: Any) -> Any:
    """An optimizer of the model's parameters with 8-bit moments, without a Trainer."""
    require_bitsandbytes()
    optimizer = cls(model.parameters(), **{**OPTIONS, **options})
    convert_in_place(optimizer, plan or planned(model), torch.device(next(model.parameters()).device.type))
    return optimizer


def give_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    """Every parameter its gradient of that step: the same whole one on any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        whole = scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = placed_like(whole.to(parameter.device), parameter)


def placed_like(whole: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim).redistribute(placements=parameter.placements)


def train(model: nn.Module, optimizer: Any, steps: int = 6) -> None:
    """Steps with a clip in the kernel, one of which is skipped."""
    for step in range(steps):
        give_gradients(model, step, scale=float("nan") if step == 2 else 1.0)
        device = next(model.parameters()).device
        optimizer.grad_scale = torch.tensor(1.7, device=device)
        optimizer.found_inf = torch.tensor(float(step == 2), device=device)
        optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def whole_states(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Every parameter's state by its name, gathered."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: {key: whole(v) for key, v in state.items()} for p, state in optimizer.state.items()}


def digest(states: dict[str, dict[str, Tensor]]) -> str:
    """One hash of names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    for name in sorted(states):
        for key, value in sorted(states[name].items()):
            found.update(f"{name} {key} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def differing(ours: Any, theirs: Any) -> list[str]:
    """Names of the values in which two nested dicts of tensors differ, or that one of them lacks."""
    if isinstance(ours, Tensor):
        return [] if ours.dtype == theirs.dtype and torch.equal(ours, theirs) else [""]
    missing = [str(key) for key in ours.keys() ^ theirs.keys()]
    return missing + [
        f"{k}.{n}".rstrip(".") for k in ours.keys() & theirs.keys() for n in differing(ours[k], theirs[k])
    ]


def eight_bit(**options: Any) -> EightBitAdam:
    """With tensors of any size in 8 bit."""
    return EightBitAdam(**{"min_8bit_size": 1, **options})


def fit_tiny(*callbacks: Any, module: Any = None, resume: Path | None = None, **options: Any) -> Any:
    """The trainer of a fit of four steps on one CPU process."""
    trainer = quiet_trainer(*callbacks, **options)
    trainer.fit(module or TinyModule(), TinyData(), ckpt_path=resume)
    return trainer


def states_of(trainer: Any) -> Any:
    """Whole states of a fit's first optimizer, by the names of parameters."""
    return whole_states(trainer.lightning_module, trainer.optimizers[0])
