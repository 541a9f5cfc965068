from __future__ import annotations

import math
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import Events, StepTimer
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.events import read_events
from lit_stable.callbacks.step_clock import StepClock, calls_that_gather


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Any:
    time = SimpleNamespace(seconds=10.0)
    monkeypatch.setattr("time.perf_counter", lambda: time.seconds)
    return time


def test_the_clock_tells_a_steps_whole_time_from_the_ranks_own(now: Any) -> None:
    clock = StepClock(torch.device("cpu"))
    now.seconds += 1  # own: data
    clock.wait_begins()  # a forward pass that gathers
    now.seconds += 2
    clock.wait_ends()
    now.seconds += 4  # own: the loss
    clock.wait_begins()  # backward and step
    now.seconds += 8
    clock.step_ends()
    assert clock.take() == [(15.0, 5.0)]
    assert clock.take() == []


def test_a_wait_on_the_host_is_not_the_ranks_own_and_ends_no_other_wait(now: Any) -> None:
    clock = StepClock(torch.device("cpu"))
    now.seconds += 1
    with clock.waiting():
        now.seconds += 2
    now.seconds += 4
    clock.wait_begins()  # backward and step, with a wait inside
    with clock.waiting():
        now.seconds += 8
    now.seconds += 16
    clock.step_ends()
    assert clock.take() == [(31.0, 5.0)]


def test_a_pause_is_no_part_of_a_step_and_what_is_disregarded_is_nan(now: Any) -> None:
    clock = StepClock(torch.device("cpu"))
    now.seconds += 1
    clock.pause()
    now.seconds += 100
    clock.go_on()
    now.seconds += 1
    clock.step_ends()
    now.seconds += 1
    clock.disregard()
    clock.step_ends()
    now.seconds += 1
    clock.step_ends()
    first, second, third = clock.take()
    assert first == (2.0, 2.0)
    assert all(map(math.isnan, second))
    assert third == (1.0, 1.0)


def test_only_sharded_children_are_waited_in() -> None:
    module = torch.nn.Module()
    module.plain, module.sharded = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    module.sharded.weight.placements = ()  # as a DTensor has
    assert calls_that_gather(module) == [module.sharded]


def fit(now: Any, folder: Path, seconds: dict[int, float], *others: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Steps of a second, but those in ``seconds``."""
    channel = Events()
    channel.folder = folder

    def wait(trainer: Any, *rest: Any) -> None:
        now.seconds += seconds.get(trainer.global_step + 1, 1.0)

    timer = StepTimer(every_steps=4, **{"warmup_steps": 1, **options})
    watch = Watch("on_train_batch_start", wait)
    trainer = quiet_trainer(channel, timer, watch, *others, max_steps=20, log_every_n_steps=4)
    trainer.fit(TinyModule(), TinyData(validation_batches=1))
    path = folder / "events.jsonl"
    return trainer, read_events(path) if path.exists() else []


def test_one_slow_step_is_one_event_at_its_step(now: Any, tmp_path: Path) -> None:
    trainer, events = fit(now, tmp_path, {11: 5.0})
    assert [(e.kind, e.step, e.evidence) for e in events] == [
        ("slow_step", 11, {"seconds": 5.0, "usual_seconds": 1.0})  # on one rank nobody is late
    ]
    assert float(trainer.callback_metrics["stability/step_seconds"]) == 1.0
    assert float(trainer.callback_metrics["stability/step_seconds_max"]) == 1.0
    assert float(trainer.callback_metrics["stability/late_seconds"]) == 0.0
    assert socket.gethostname()


def test_the_first_steps_and_those_with_a_save_are_not_judged(now: Any, tmp_path: Path) -> None:
    def save(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 10:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    _, events = fit(now, tmp_path, {1: 60.0, 11: 9.0}, Watch("on_train_batch_start", save))
    assert events == []


def test_a_run_of_equal_steps_raises_nothing(now: Any, tmp_path: Path) -> None:
    assert fit(now, tmp_path, {})[1] == []


@pytest.mark.parametrize(("option", "value"), [("slow_factor", 1.0), ("margin_seconds", 0.0), ("warmup_steps", -1)])
def test_numbers_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`StepTimer\({option}={value}\)`: must be"):
        StepTimer(**{option: value})


def test_a_card_that_is_slow_twice_in_a_row_is_told_once() -> None:
    timer, told = StepTimer(), []
    timer._hosts = ["a", "b"]
    trainer = quiet_trainer(Events())
    Events.of(trainer).listeners["test"] = lambda event: told.append((event.kind, event.evidence["host"]))
    for seconds in ([1.0, 1.5], [1.0, 1.5], [1.0, 1.5], [1.0, 1.0], [1.0, 1.5], [1.5, 1.0]):
        timer._judge_devices(trainer, seconds)
    assert told == [("slow_device", "b")]
