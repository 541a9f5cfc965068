from __future__ import annotations

from typing import Any

import pytest
import torch
from late_on_a_cpu import lagging
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import AccumulationWindows, Detectors, LateReads


def fit(late: LateReads, said: list[Any], *more: Any, **options: Any) -> Any:
    """Train; every step gives its number to be read, and `said` gets it, and the batches that ended."""

    def give(trainer: Any, outputs: Any, batch: Any, number: int) -> None:
        late.read(torch.tensor([float(number), 0.5]), lambda numbers: said.append(numbers))

    begins = Watch("on_train_batch_start", lambda trainer, batch, number: said.append(f"batch {number} begins"))
    trainer = quiet_trainer(late, Watch("on_train_batch_end", give), begins, *more, **{"max_steps": 3, **options})
    trainer.fit(TinyModule(), TinyData())
    return trainer


BEGINS, READ = [f"batch {n} begins" for n in range(3)], [[float(n), 0.5] for n in range(3)]


def test_on_a_cpu_a_row_is_read_as_it_is_given() -> None:
    said: list[Any] = []
    fit(LateReads(), said)
    assert said == [BEGINS[0], READ[0], BEGINS[1], READ[1], BEGINS[2], READ[2]]


def test_a_row_is_read_at_the_end_of_the_next_batch_and_the_last_at_the_end() -> None:
    said: list[Any] = []
    fit(lagging(), said)
    assert said == [BEGINS[0], BEGINS[1], READ[0], BEGINS[2], READ[1], READ[2]]


def test_micro_batches_count_not_steps() -> None:
    said: list[Any] = []
    fit(lagging(), said, AccumulationWindows(8, 2), max_steps=1)
    assert said[:3] == [BEGINS[0], BEGINS[1], READ[0]]


@pytest.mark.parametrize("hook", ["on_validation_start", "on_train_epoch_end", "on_train_end", "state_dict"])
def test_before_a_validation_a_save_and_an_end_everything_is_read(hook: str) -> None:
    late, read = lagging(), []
    trainer = quiet_trainer(late)
    late.read(torch.ones(1), read.append)
    assert not read
    getattr(late, hook)(*(() if hook == "state_dict" else (trainer, TinyModule())))
    assert read == [[1.0]]


def test_an_error_loses_no_row() -> None:
    said: list[Any] = []

    def fail(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("now")

    with pytest.raises(RuntimeError, match="now"):
        fit(lagging(), said, Watch("on_train_batch_end", fail))
    assert said[-1] == [1.0, 0.5]


def test_an_error_stays_the_first_where_the_device_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is read after it nor what is undone takes its place, and whoever comes later is still called."""

    def gone(*args: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def fail(*args: Any) -> None:
        raise ValueError("the first")

    later, undone = Detectors(), lagging()
    monkeypatch.setattr(undone, "flush", gone)
    monkeypatch.setattr(later, "teardown", gone)
    heard: list[str] = []
    last = Watch("on_exception", lambda trainer, exception: heard.append(str(exception)))
    with pytest.warns(UserWarning, match="after ValueError") as said, pytest.raises(ValueError, match="the first"):
        quiet_trainer(undone, later, Watch("on_train_batch_end", fail), last).fit(TinyModule(), TinyData())
    assert heard == ["the first"]
    beside = "after ValueError: an illegal memory access was encountered"
    assert {str(w.message) for w in said} == {f"LateReads, {beside}", f"Detectors, {beside}"}
