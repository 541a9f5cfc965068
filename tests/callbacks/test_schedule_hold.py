from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lit_stable.callbacks.schedule_hold import Never, ScheduleHold


def trainer_with(*configs: Any) -> Any:
    return SimpleNamespace(lr_scheduler_configs=list(configs))


def test_no_step_is_a_multiple_of_never() -> None:
    assert all(step % Never(1) for step in range(5))
    assert int(Never(3)) == 3


def test_a_hold_lasts_until_release_and_gives_the_frequency_back() -> None:
    step = SimpleNamespace(interval="step", frequency=1)
    epoch = SimpleNamespace(interval="epoch", frequency=1)
    hold = ScheduleHold()
    hold.release()  # nothing is held: nothing happens
    hold.hold(trainer_with(step, epoch))
    assert 4 % step.frequency
    assert not 4 % epoch.frequency
    hold.release()
    assert (type(step.frequency), step.frequency) == (int, 1)
