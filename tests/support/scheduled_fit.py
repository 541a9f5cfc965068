"""A tiny project with two parameter groups under a scheduler of its own, and the rates that its steps used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback
from tiny_fit import TinyData, TinyModule, adamw, quiet_trainer
from torch.optim import lr_scheduler as schedulers

from lit_stable.callbacks import EffectiveLR
from lit_stable.callbacks import configured as configured_module
from lit_stable.callbacks import events as events_module
from lit_stable.callbacks import lr_override as override_module

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda k: 1 / (k + 1)),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 12),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 3), schedulers.CosineAnnealingLR(o, 10)], [3]
    ),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=13),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 12, 2.0),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 1.0, 1),
}


class Scheduled(TinyModule):
    """Two groups with rates 5 : 1, the second without decay, under a scheduler or none."""

    def __init__(self, make_scheduler: Callable[[Any], Any] | None = None, lr: float = 0.1, **options: Any) -> None:
        super().__init__(adamw(**options))
        self.make_scheduler, self.lr = make_scheduler, lr

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer([{"params": self.net[0].parameters(), "lr": self.lr}])  # type: ignore[list-item]
        rest = {"params": list(self.net[3].parameters()), "lr": self.lr / 5, "weight_decay": 0.0}
        optimizer.add_param_group(rest)
        if self.make_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_scheduler(optimizer), "interval": "step"}]


class Rates(Callback):
    """The rates of both groups in every step: those that it used, and the scheduler's own."""

    def __init__(self) -> None:
        self.used: list[list[float]] = []
        self.outside: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if effective := EffectiveLR.of(trainer).used:
            self.used.append(effective["lr"])
            self.outside.append(EffectiveLR.of(trainer).own["lr"])


def fit(module: Any, *callbacks: Any, steps: int, resume: Any = None, save: Any = None) -> tuple[Any, Rates]:
    """The trainer, and the rates of every step."""
    rates = Rates()
    trainer = quiet_trainer(EffectiveLR(), *callbacks, rates, max_steps=steps)
    trainer.fit(module, TinyData(), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return trainer, rates


def take_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that ``LROverride`` prints from now on."""
    lines: list[str] = []
    for module in (override_module, configured_module, events_module):
        monkeypatch.setattr(module, "rank_zero_info", lines.append)
    monkeypatch.setattr(configured_module, "rank_zero_warn", lines.append)
    return lines
