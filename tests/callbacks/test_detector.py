from __future__ import annotations

from copy import deepcopy

import pytest
from series import NOISES, healthy, noisy, show, trace

from lit_stable.callbacks.detector import Detector
from lit_stable.callbacks.loss_scale_collapse import LossScaleCollapse
from lit_stable.callbacks.low_loss import LowLoss
from lit_stable.callbacks.plateau import Plateau
from lit_stable.callbacks.slow_divergence import SlowDivergence
from lit_stable.callbacks.spike_alarm import SpikeAlarm
from lit_stable.callbacks.surge import Surge

ON_LOSS = [SpikeAlarm, SlowDivergence, LowLoss]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("cls", ON_LOSS, ids=lambda c: c.__name__)
def test_no_alarm_in_10k_steps_of_a_healthy_run(cls: type[Detector], noise: str) -> None:
    assert show(cls(), healthy(noise)) == []


@pytest.mark.parametrize("cls", ON_LOSS, ids=lambda c: c.__name__)
def test_no_alarm_on_the_recorded_healthy_run(cls: type[Detector]) -> None:
    assert show(cls(), trace("llama60m_lr1e-3_healthy")) == []


@pytest.mark.parametrize("cls", ON_LOSS, ids=lambda c: c.__name__)
def test_a_constant_history_is_no_alarm(cls: type[Detector]) -> None:
    assert show(cls(), [3.0] * 1000) == []


@pytest.mark.parametrize("cut", [1, 90, 320, 480])
@pytest.mark.parametrize(
    "detector",
    [SpikeAlarm(), SlowDivergence(), Plateau(patience=50), LowLoss(floor=2.0), LossScaleCollapse(), Surge(["*"])],
    ids=lambda d: d.kind,
)
def test_what_was_saved_and_restored_goes_on_alike(detector: Detector, cut: int) -> None:
    def values(step: int, loss: float) -> dict[str, float]:
        scale = 2.0 ** (16 - max(0, min(10, step - 330)))
        loss += 6.0 * (step in (300, 301)) - 2.0 * (step in (310, 311)) + max(0, step - 350) / 99
        loss *= 1.01 ** max(0, step - 800)
        return {"loss": loss, "grad_norm": loss, "loss_scale": scale, **({"val_loss": loss} if step % 10 == 0 else {})}

    rows = [(step, values(step, loss)) for step, loss in enumerate(noisy(1200), 1)]
    straight, first, second = (deepcopy(detector) for _ in range(3))
    found = [event for step, row in rows for event in straight.observe(step, row)]
    assert found
    again = [event for step, row in rows[:cut] for event in first.observe(step, row)]
    second.load_state_dict(first.state_dict())
    again += [event for step, row in rows[cut:] for event in second.observe(step, row)]
    assert again == found
    assert second.state_dict() == straight.state_dict()


def test_state_that_lacks_something_begins_it_anew() -> None:
    detector = SpikeAlarm()
    detector.load_state_dict({})
    assert detector.state_dict() == SpikeAlarm().state_dict()
