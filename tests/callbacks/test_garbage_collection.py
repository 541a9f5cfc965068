from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import GarbageCollection
from lit_stable.callbacks.base import MisconfigurationException


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def fit(*others: Any, every: int = 2, steps: int = 5) -> Any:
    trainer = quiet_trainer(
        GarbageCollection(every), *others, max_steps=steps, log_every_n_steps=1, accumulate_grad_batches=2
    )
    trainer.fit(TinyModule(), TinyData())
    return trainer


def test_it_collects_at_its_steps_and_the_automatic_collector_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    state: list[bool] = []
    trainer: Any = None

    def collect(*args: Any) -> int:
        collected.append(watched["trainer"].global_step)
        return 0

    watched: dict[str, Any] = {}
    start = Watch("on_fit_start", lambda t: watched.update(trainer=t))
    off = Watch("on_train_batch_start", lambda t, *rest: state.append(gc.isenabled()))
    monkeypatch.setattr(gc, "collect", collect)
    trainer = fit(start, off)
    assert collected == [0, 2, 4]
    assert not any(state)
    assert gc.isenabled()
    assert float(trainer.callback_metrics["stability/gc_seconds"]) >= 0


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    fit()
    assert not gc.isenabled()


def test_it_is_on_again_after_a_fit_that_failed() -> None:
    def fail(trainer: Any, *rest: Any) -> None:
        raise ValueError("as planned")

    with pytest.raises(ValueError, match="as planned"):
        fit(Watch("on_train_batch_end", fail))
    assert gc.isenabled()


def test_every_steps_must_be_at_least_1() -> None:
    with pytest.raises(MisconfigurationException, match=r"`GarbageCollection\(every_steps=0\)`: must be at least 1"):
        GarbageCollection(0)
