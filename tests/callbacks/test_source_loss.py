from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_fit import TinyData, TinyModule, quiet_trainer
from tiny_gpt_run import NumberedSamples, fit
from torch import Tensor

from lit_stable.callbacks import SourceLoss
from lit_stable.callbacks.base import MisconfigurationException
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


def _keep(seen: list[Any], pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    seen.append(pair)
    return pair


def test_without_names_or_losses_it_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"the data module has no `source_names`; give names"):
        quiet_trainer(SourceLoss(), max_steps=1).fit(TinyModule(), TinyData())
    trainer = quiet_trainer(SourceLoss(names=["a"]), max_steps=1, log_every_n_steps=1)
    with pytest.raises(MisconfigurationException, match="TinyModule keeps no `sample_losses`"):
        trainer.fit(TinyModule(), TinyData())
