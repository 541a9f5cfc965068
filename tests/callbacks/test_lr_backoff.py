from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import EffectiveLR, LRBackoff, Progress, emit
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.events import Event

pytestmark = pytest.mark.filterwarnings("ignore:LRBackoff", "ignore:step ", "ignore:rank ")


def fit(
    backoff: LRBackoff | None, events: dict[int, Event], *others: Any, steps: int = 12, resume: Any = None
) -> tuple[Trainer, dict[int, float]]:
    """A fit in which something happens after some steps, and the learning rate that each step used."""
    rates: dict[int, float] = {}

    def tell(trainer: Trainer, *rest: Any) -> None:
        step = Progress.of(trainer).steps
        rates[step] = EffectiveLR.of(trainer).used["lr"][0]
        if step in events:
            emit(trainer, events[step])

    callbacks = [Watch("on_train_batch_end", tell), *([backoff] if backoff else [EffectiveLR()]), *others]
    trainer = quiet_trainer(*callbacks, max_steps=steps, log_every_n_steps=1)
    trainer.fit(TinyModule(), TinyData(), ckpt_path=resume)
    return trainer, rates


def spikes(*steps: int, **evidence: Any) -> dict[int, Event]:
    return {step: Event(step, "spike", evidence) for step in steps}


def test_an_event_cuts_the_rate_once_and_for_good() -> None:
    trainer, rates = fit(LRBackoff(), spikes(3))
    assert [rates[step] for step in (3, 4, 12)] == pytest.approx([0.05, 0.045, 0.045])
    assert float(trainer.callback_metrics["stability/backoff_factor"]) == pytest.approx(0.9)


def test_a_cut_is_told_in_a_sentence_whatever_the_event_says_of_itself() -> None:
    words = (
        r"LRBackoff: step 3: spike(: value 2)?; from step 4 on the learning rate is 0\.9 times the schedule's \(was 1\)"
    )
    for evidence in ({}, {"value": 2.0}):
        with pytest.warns(UserWarning, match=words):
            fit(LRBackoff(), spikes(3, **evidence), steps=4)


def test_within_the_cooldown_there_is_no_other_cut() -> None:
    _, rates = fit(LRBackoff(factor=0.5, cooldown=4), spikes(2, 3, 5, 6))
    assert [rates[step] for step in (3, 5, 6, 7, 12)] == pytest.approx([0.025, 0.025, 0.025, 0.0125, 0.0125])


def test_the_floor_holds() -> None:
    _, rates = fit(LRBackoff(factor=0.5, cooldown=0, floor=0.3), spikes(2, 3, 4))
    assert [rates[step] for step in (3, 4, 5, 12)] == pytest.approx([0.025, 0.015, 0.015, 0.015])


@pytest.mark.parametrize(
    ("options", "event"),
    [
        ({}, Event(3, "plateau", {})),
        ({}, Event(3, "spike", {}, rank=0)),
        ({"signals": ["grad_norm"]}, Event(3, "spike", {"signal": "loss"})),
        ({"action": "log"}, Event(3, "spike", {})),
    ],
)
def test_what_does_not_concern_it_changes_no_bit(options: dict[str, Any], event: Event) -> None:
    with_it, without = fit(LRBackoff(**options), {3: event})[0], fit(None, {3: event})[0]
    assert_same_bits(snapshot(with_it), snapshot(without))


def test_patterns_and_signals_choose() -> None:
    _, rates = fit(LRBackoff(kinds="slow_* sp?ke", signals=["grad_norm"]), spikes(3, signal="grad_norm"))
    assert rates[4] == pytest.approx(0.045)


def test_a_cut_survives_a_resume_and_so_does_its_cooldown(tmp_path: Path) -> None:
    options: dict[str, Any] = {"factor": 0.5, "cooldown": 6}
    events = spikes(3, 7, 10)
    straight, rates = fit(LRBackoff(**options), events, SaveAtSteps(tmp_path))
    assert [rates[step] for step in (4, 8, 11)] == pytest.approx([0.025, 0.025, 0.0125])
    for micro in (2, 3, 4, 9, 10):
        again, _ = fit(LRBackoff(**options), events, resume=tmp_path / f"micro-{micro}.ckpt")
        assert_same_bits(snapshot(again), snapshot(straight), f"from step {micro}")


def test_cuts_that_were_only_logged_are_not_made_by_a_resume_that_acts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"factor": 0.5, "cooldown": 4, "floor": 0.3}
    fit(LRBackoff(action="log", **options), spikes(2, 6), SaveAtSteps(tmp_path), steps=8)
    acting, rates = fit(LRBackoff(**options), spikes(9), resume=tmp_path / "micro-8.ckpt")
    assert [rates[step] for step in (9, 10, 12)] == pytest.approx([0.05, 0.025, 0.025])
    assert float(acting.callback_metrics["stability/backoff_factor"]) == 0.5
    logging, _ = fit(LRBackoff(action="log", **options), spikes(9), resume=tmp_path / "micro-8.ckpt")
    assert float(logging.callback_metrics["stability/backoff_factor"]) == pytest.approx(0.3), "what it would be"


def test_a_cut_that_was_made_is_there_again_behind_a_resume_that_logs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"factor": 0.5, "cooldown": 6}
    fit(LRBackoff(**options), spikes(2), SaveAtSteps(tmp_path / "a"), steps=4)
    logging = LRBackoff(action="log", **options)
    _, rates = fit(logging, spikes(9), SaveAtSteps(tmp_path / "b"), steps=10, resume=tmp_path / "a" / "micro-4.ckpt")
    assert (rates[5], logging.rate_factor) == (0.05, 0.25)
    _, rates = fit(LRBackoff(**options), spikes(11), resume=tmp_path / "b" / "micro-6.ckpt")
    assert (rates[11], rates[12]) == pytest.approx((0.025, 0.0125))


def test_a_state_that_does_not_tell_logged_from_made_means_made() -> None:
    state = {"factor": 0.5, "last_cut": 3, "events": []}
    backoff = LRBackoff()
    backoff.load_state_dict(state)
    assert backoff.state_dict() == {**state, "made": {"factor": 0.5, "last_cut": 3}}


@pytest.mark.parametrize("wrong", [{"factor": 1.0}, {"factor": 0.0}, {"cooldown": -1}, {"floor": 1.0}, {"floor": -0.1}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(MisconfigurationException, match=rf"`LRBackoff\({name}={value}\)`: must "):
        LRBackoff(**wrong)
