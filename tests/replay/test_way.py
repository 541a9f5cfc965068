"""How far a replay says it is."""

from __future__ import annotations

import pytest
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import AccumulationWindows
from lit_stable.replay.way import Way


def test_a_line_comes_when_it_is_time_with_the_seconds_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]

    def pass_time(*args: object) -> None:
        now[0] += 3.0

    way = Way("replay 1 of 2", "the beginning", 12, clock=lambda: now[0])
    clock = Watch("on_train_batch_start", pass_time)
    quiet_trainer(clock, AccumulationWindows(4, 2), way, max_steps=12).fit(TinyModule(), TinyData())
    assert capsys.readouterr().out.splitlines() == [
        "replay 1 of 2: 12 steps, 1 to 12, from the beginning",
        *(f"replay 1 of 2: step {step}/12, about {6 * (12 - step)} s left" for step in (2, 4, 6, 8, 10)),
    ]
