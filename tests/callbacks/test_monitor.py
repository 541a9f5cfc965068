from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tiny_fit import TinyData, TinyModule, quiet_trainer

from lit_stable.callbacks import GradientMonitor, SourceLoss, UpdateMonitor, WeightMonitor
from lit_stable.callbacks.base import MisconfigurationException


def test_every_steps_must_be_at_least_1() -> None:
    with pytest.raises(MisconfigurationException, match=r"`WeightMonitor\(every_steps=0\)`: must be at least 1"):
        WeightMonitor(every_steps=0)


def test_a_trainer_that_never_logs_is_refused() -> None:
    trainer = quiet_trainer(WeightMonitor(), log_every_n_steps=0)
    with pytest.raises(MisconfigurationException, match=r"log_every_n_steps=0\)`: nothing is ever logged"):
        trainer.fit(TinyModule(), TinyData())


@pytest.mark.parametrize(("every", "steps"), [(None, [2, 4, 6]), (1, [2, 4, 6]), (3, [4]), (4, [4]), (5, [6])])
def test_it_measures_at_its_steps_alone(every: int | None, steps: list[int]) -> None:
    measured: list[int] = []

    class Noting(WeightMonitor):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):  # type: ignore[no-untyped-def]
            if self.is_due(trainer):
                measured.append(trainer.global_step + 1)

        def on_train_batch_end(self, trainer, pl_module, *args):  # type: ignore[no-untyped-def]
            if self.has_ended(trainer):
                measured.append(-trainer.global_step)

    trainer = quiet_trainer(Noting(every), max_steps=6, log_every_n_steps=2, accumulate_grad_batches=2)
    trainer.fit(TinyModule(), TinyData())
    assert measured == [sign * step for step in steps for sign in (1, -1)]


class TwoOptimizers(TinyModule):
    """Steps its optimizers, both or in turns, in every ``window``-th batch, the other batches add up."""

    automatic_optimization = False

    def __init__(self, window: int, turns: bool = False) -> None:
        super().__init__()
        self.window, self.turns = window, turns

    def configure_optimizers(self) -> Any:
        first, *rest = self.net
        return [torch.optim.AdamW(m.parameters()) for m in (first, torch.nn.ModuleList(rest))]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.sample_losses = loss.detach()[None], torch.ones(1), torch.zeros(1, dtype=torch.long)
        self.manual_backward(loss)
        if batch_idx % self.window == 0:
            optimizers = self.optimizers()
            for optimizer in [optimizers[batch_idx // self.window % 2]] if self.turns else optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("turns", [False, True], ids=["together", "in turns"])
@pytest.mark.parametrize("window", [1, 2])
def test_several_optimizers_step_together_or_in_turns(window: int, turns: bool) -> None:
    """Together `global_step` counts each, and so is odd before every step; in turns the second takes all due steps."""
    measured: dict[str, list[int]] = {}

    class Noting(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            for key in ("weight_rms/net.0.weight", "grad_norm_layer/net.0", "update_rms", "source_loss/all"):
                if trainer.callback_metrics.pop(f"stability/{key}", None) is not None:
                    measured.setdefault(key, []).append(trainer.global_step // (1 if turns else 2))

    monitors = [WeightMonitor(), GradientMonitor(), UpdateMonitor(), SourceLoss(names=["all"])]
    trainer = quiet_trainer(*monitors, Noting(), max_steps=6 if turns else 12, log_every_n_steps=2)
    trainer.fit(TwoOptimizers(window, turns), TinyData())
    assert measured == {key: [2, 4, 6] for key in measured}
    assert len(measured) == 4
