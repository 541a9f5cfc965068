from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tiny_fit import TinyData, TinyModule, quiet_trainer
from tiny_gpt_run import NumberedSamples, fit
from torch import Tensor

from lit_stable.callbacks import BlackBox, Detectors, GradSpikeSkip, RecoveryTime, SourceLoss
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.window_loss import WindowLoss
from lit_stable.model.loss import sample_losses


def test_losses_of_two_sources_over_a_whole_window_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    original = NumberedSamples.__iter__

    def two_sources(self: Any) -> Any:
        for number, batch in enumerate(original(self)):
            batch["labels"][0, number % 5 :] = -100  # not every sample has as many tokens
            yield {**batch, "source": torch.tensor([0, 1]) if number % 2 else torch.tensor([1, 1])}

    monkeypatch.setattr(NumberedSamples, "__iter__", two_sources)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    monkeypatch.setattr("lit_stable.training_loss.sample_losses", lambda *a: _keep(seen, sample_losses(*a)))
    run = fit(steps=2, callbacks=(SourceLoss(names=["a", "b", "c"]),))
    sources = [torch.tensor([0, 1]) if n % 2 else torch.tensor([1, 1]) for n in range(4, 8)]
    window = [(s, c) for s, c in seen if s.requires_grad][-4:]
    sums = {k: sum(float(s[source == k].sum()) for (s, _), source in zip(window, sources, strict=True)) for k in (0, 1)}
    tokens = {k: sum(int(c[source == k].sum()) for (_, c), source in zip(window, sources, strict=True)) for k in (0, 1)}
    metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items()}
    assert metrics["stability/source_loss/a"] == pytest.approx(sums[0] / tokens[0], rel=1e-6)
    assert metrics["stability/source_loss/b"] == pytest.approx(sums[1] / tokens[1], rel=1e-6)
    assert math.isnan(metrics["stability/source_loss/c"])
    assert metrics["stability/source_share/a"] == pytest.approx(tokens[0] / (tokens[0] + tokens[1]))
    assert metrics["stability/source_share/c"] == 0.0


def _keep(seen: list[Any], value: Any) -> Any:
    seen.append(value)
    return value


class Numbered(TinyModule):
    """The loss of each batch is its number over all epochs; those in ``left_out`` have none, ``cut`` ends its epoch."""

    def __init__(self, left_out: tuple[int, ...] = (), cut: int = -1) -> None:
        super().__init__()
        self.left_out, self.cut, self.number = left_out, cut, -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.number += 1
        return -1 if self.number == self.cut else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.number not in self.left_out:
            self.sample_losses = torch.tensor([float(self.number)]), torch.ones(1), torch.zeros(1, dtype=torch.long)
        return None if self.number in self.left_out else loss * 0 + self.number


def measured(module: Numbered, *callbacks: Any, steps: int = 3, **options: Any) -> list[float]:
    found: list[float] = []

    class Noting(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if (loss := trainer.callback_metrics.pop("stability/source_loss/a", None)) is not None:
                found.append(float(loss))

    monitors = [SourceLoss(names=["a"]), *callbacks, Noting()]
    options = {"max_steps": steps, "accumulate_grad_batches": 2, "log_every_n_steps": 1, **options}
    quiet_trainer(*monitors, **options).fit(module, TinyData())
    return found


def test_a_micro_batch_without_a_loss_does_not_count() -> None:
    assert measured(Numbered(left_out=(1, 2))) == [0.0, 3.0, 4.5]
    assert measured(Numbered(left_out=(1, 2)), log_every_n_steps=3) == [4.5]
    first, *rest = measured(Numbered(left_out=(0, 1, 4, 5)))
    assert rest[0] == 2.5
    assert [math.isnan(first), math.isnan(rest[1])] == [True, True]


def test_a_window_that_an_epoch_cut_short_is_in_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are in no step, so its losses and tokens are in none: those of 2 and of 3, which is not begun."""
    means: list[float] = []
    own = WindowLoss.own
    monkeypatch.setattr(WindowLoss, "own", lambda self, trainer: _keep(means, own(self, trainer)))
    judging = [GradSpikeSkip(signal="both"), RecoveryTime(), Detectors(), BlackBox()]
    assert measured(Numbered(cut=3), *judging) == [0.5, 4.5, 6.5]
    assert means == [mean for mean in (0.5, 4.5, 6.5) for _ in judging]


def test_without_names_or_losses_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"the data module has no `source_names`; give names"):
        quiet_trainer(SourceLoss(), max_steps=1).fit(TinyModule(), TinyData())
    trainer = quiet_trainer(SourceLoss(names=["a"]), max_steps=1, log_every_n_steps=1)
    with pytest.raises(MisconfigurationException, match="TinyModule keeps no `sample_losses`"):
        trainer.fit(TinyModule(), TinyData())
