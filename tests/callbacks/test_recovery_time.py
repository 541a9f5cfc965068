from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_fit import TinyData, TinyModule, quiet_trainer
from torch import Tensor

from lit_stable.callbacks import Events, RecoveryTime
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.events import read_events
from lit_stable.callbacks.loss_return import LossReturn, Recovered


def healthy(step: int) -> float:
    """A loss that falls, with noise."""
    return 3.0 + 2.0 * math.exp(-step / 500) + random.Random(step).gauss(0.0, 0.02)


def watch(
    losses: dict[int, float], steps: int, recovery: LossReturn | None = None
) -> tuple[LossReturn, list[Recovered]]:
    recovery = recovery or LossReturn(window=100, rise=0.2, patience=500)
    found = [recovery.observe(step, losses.get(step, healthy(step))) for step in range(1, steps + 1)]
    return recovery, [ended for ended in found if ended is not None]


def decay_from(begin: int, height: float, steps: int) -> dict[int, float]:
    """A spike that comes back along a straight line, in so many steps."""
    return {begin + i: healthy(begin + i) + height * (1 - i / steps) for i in range(steps)}


def test_a_healthy_loss_has_no_spike() -> None:
    recovery, ended = watch({}, 3000)
    assert (recovery.spikes, recovery.last, ended) == (0, 0, [])


def test_the_time_back_is_the_spikes_length() -> None:
    recovery, (ended,) = watch(decay_from(1000, 3.0, 40), 1500)
    assert ended.began == 1000
    assert ended.back
    assert ended.before == pytest.approx(healthy(990), abs=0.1)
    assert ended.peak == pytest.approx(healthy(1000) + 3.0)
    assert abs(recovery.last - 40) <= 3
    assert recovery.spikes == 1


def test_of_two_spikes_the_second_took_longer() -> None:
    lasts = []
    recovery = LossReturn(100, 0.2, 500)
    losses = {**decay_from(600, 2.0, 20), **decay_from(900, 2.0, 200)}
    for step in range(1, 1500):
        if recovery.observe(step, losses.get(step, healthy(step))) is not None:
            lasts.append(recovery.last)
    assert len(lasts) == 2
    assert abs(lasts[0] - 20) <= 5
    assert abs(lasts[1] - 200) <= 30


def test_one_bad_batch_is_over_at_once_and_a_nan_is_a_spike() -> None:
    recovery, (ended,) = watch({700: math.nan}, 800)
    assert (ended.began, ended.peak, ended.back) == (700, math.inf, True)
    assert recovery.last == 1


def test_a_loss_that_stays_up_is_given_up_and_the_new_level_is_normal() -> None:
    recovery, ended = watch({step: 6.0 + 0.01 * random.Random(step).random() for step in range(700, 3000)}, 2900)
    assert [(e.began, e.back) for e in ended] == [(700, False)]
    assert recovery.last == 501
    assert recovery.spikes == 1


def test_how_long_it_lasts_so_far() -> None:
    recovery, _ = watch(dict.fromkeys(range(300, 400), 9.0), 320)
    assert recovery.steps_since(320) == 21


def test_goes_on_from_its_state_as_if_nothing_had_been(tmp_path: Path) -> None:
    losses = decay_from(400, 2.0, 100)
    straight, ended = watch(losses, 800)
    for cut in (250, 450):
        first, found = watch(losses, cut)
        torch.save(first.state_dict(), tmp_path / "a.pt")
        second = LossReturn(100, 0.2, 500)
        second.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
        for step in range(cut + 1, 801):
            more = second.observe(step, losses.get(step, healthy(step)))
            found += [more] if more is not None else []
        assert found == ended
        assert second.state_dict() == straight.state_dict()


class Scripted(TinyModule):
    """Its loss is what a script says, whatever the weights."""

    def __init__(self, losses: dict[int, float]) -> None:
        super().__init__()
        self.losses = losses

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        step = self.trainer.global_step + 1
        return loss * 0 + self.losses.get(step, 1.0 + 0.001 * (step % 3))


def test_events_and_metrics_of_a_fit(tmp_path: Path) -> None:
    channel = Events()
    channel.folder = tmp_path
    losses = dict.fromkeys(range(31, 41), 4.0)
    monitor = RecoveryTime(every_steps=20)
    trainer: Any = quiet_trainer(channel, monitor, max_steps=60, log_every_n_steps=10, accumulate_grad_batches=2)
    trainer.fit(Scripted(losses), TinyData())
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event.kind == "spike_recovered"
    assert event.evidence["began"] == 31
    assert event.evidence["loss_peak"] == 4.0
    assert event.evidence["steps"] == pytest.approx(10, abs=3)
    metrics = trainer.callback_metrics
    assert float(metrics["stability/recovery_steps"]) == event.evidence["steps"]
    assert float(metrics["stability/recovering_steps"]) == 0.0
    assert float(metrics["stability/loss_spikes"]) == 1.0


@pytest.mark.parametrize(("option", "value"), [("rise", 0.0), ("patience", 4)])
def test_numbers_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`RecoveryTime\({option}={value}\)`: must be"):
        RecoveryTime(**{option: value})
