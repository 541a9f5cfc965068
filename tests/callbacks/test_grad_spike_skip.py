from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import (
    SaveAtSteps,
    TinyData,
    TinyModule,
    Watch,
    adamw,
    assert_same_bits,
    quiet_trainer,
    snapshot,
    train_more,
)

from lit_stable.callbacks import AccumulationWindows, Events, GradClip, GradNorm, GradSpikeSkip, Progress, StepSeed
from lit_stable.callbacks.event_ring import EventRing
from lit_stable.callbacks.events import Event, read_events
from lit_stable.callbacks.spike_events import TooManySkips

both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
pytestmark = pytest.mark.filterwarnings("ignore:GradSpikeSkip")


def strict(**options: Any) -> GradSpikeSkip:
    """Statistics that are in force after four steps, and a limit that the tiny module keeps unless it is poisoned."""
    return GradSpikeSkip(**{"z_score": 6.0, "warmup_steps": 4, "window": 16, **options})


def states_after_each_step(*callbacks: Any, max_steps: int, module: TinyModule, **options: Any) -> tuple[Any, Any]:
    states: dict[int, Any] = {}

    def note(trainer: Any, *rest: Any) -> None:
        states[trainer.global_step] = snapshot(trainer)

    trainer = quiet_trainer(*callbacks, Watch("on_train_batch_end", note), max_steps=max_steps, **options)
    trainer.fit(module, TinyData())
    return trainer, states


# -- a skip is no step -------------------------------------------------------------------------------------------------


@both_kernels
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e4], ids=str)
def test_a_skip_leaves_weights_moments_and_step_counts_bit_identical(fused: bool, factor: float) -> None:
    module = TinyModule(adamw(fused=fused, lr=1e-3), poison={6: factor, 7: factor / 2})
    trainer, states = states_after_each_step(callback := strict(), max_steps=10, module=module)
    assert_same_bits(states[8], states[6])
    assert not torch.equal(states[9]["weights"]["net.0.weight"], states[8]["weights"]["net.0.weight"])
    assert (Progress.of(trainer).skipped, Progress.of(trainer).applied) == (2, 8)
    assert {int(s["step"]) for s in trainer.optimizers[0].state.values()} == {8}
    assert [(e.step, e.skipped) for e in callback.events] == [(7, True), (8, True)]


def test_fused_and_looped_optimizers_skip_the_same_steps_to_the_same_end() -> None:
    ends = []
    for fused in (True, False):
        module = TinyModule(adamw(fused=fused, lr=1e-3), poison={6: 1e4, 9: math.nan})
        _, states = states_after_each_step(callback := strict(), max_steps=12, module=module)
        ends.append((states[12]["weights"], [e.step for e in callback.events]))
    assert ends[0][1] == ends[1][1] == [7, 10]
    torch.testing.assert_close(ends[0][0], ends[1][0])


def test_bf16_mixed_skips_without_a_gradient_scaler() -> None:
    module = TinyModule(adamw(lr=1e-3), poison={6: 1e4, 7: math.nan})
    trainer, states = states_after_each_step(strict(), max_steps=9, module=module, precision="bf16-mixed")
    assert trainer.precision_plugin.scaler is None
    assert_same_bits(states[8], states[6])


def test_optimizer_steps_are_counted_not_micro_batches() -> None:
    class BadBatch(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            assert loss is not None
            return loss * 1e4 if batch_idx == 3 * 6 + 1 else loss

    trainer = quiet_trainer(callback := strict(), AccumulationWindows(6, 2), max_steps=10)
    trainer.fit(BadBatch(adamw(lr=1e-3)), TinyData())
    assert [e.step for e in callback.events] == [7]
    assert (Progress.of(trainer).steps, Progress.of(trainer).samples) == (10, 60)


def test_a_window_without_any_loss_is_no_spike_and_tells_nothing() -> None:
    class NoLoss(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            return None if batch_idx in (2, 6) else super().training_step(batch, batch_idx)

    seen: list[bool] = []
    callback = strict()
    watch = Watch("on_train_batch_end", lambda *a: seen.append(bool(callback.skipped)))
    trainer = quiet_trainer(callback, watch, max_steps=8)
    trainer.fit(NoLoss(adamw(lr=1e-3)), TinyData())
    assert (callback.events, Progress.of(trainer).skipped) == ([], 2)
    assert len(callback.state_dict()["detector"]["windows"]["grad_norm"]["values"]) == 6
    assert seen == [i in (2, 6) for i in range(8)]  # such a step changed nothing either


def test_with_clipping_a_bad_step_is_counted_once_and_clipping_goes_on() -> None:
    module = TinyModule(adamw(lr=1e-3), poison={6: math.nan, 8: 1e4})
    trainer = quiet_trainer(GradClip(0.01), callback := strict(), max_steps=12, log_every_n_steps=0)
    trainer.fit(module, TinyData())
    assert [e.cause for e in callback.events] == ["non_finite", "z_score"]
    assert Progress.of(trainer).skipped == 2
    assert next(c for c in trainer.callbacks if isinstance(c, GradClip)).state_dict()["clipped"] == 11.0


# -- what is judged ----------------------------------------------------------------------------------------------------


def test_the_norm_is_the_one_before_lightnings_own_clipping() -> None:
    module = TinyModule(adamw(lr=1e-3, fused=False), poison={6: 1e4})
    quiet_trainer(callback := strict(), max_steps=8, gradient_clip_val=1e-3).fit(module, TinyData())
    assert [e.step for e in callback.events] == [7]
    assert callback.events[0].norm > 100


def test_the_loss_is_the_mean_over_the_window() -> None:
    losses: list[float] = []

    class Noted(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            assert loss is not None
            losses.append(loss.item())
            return loss

    callback = GradSpikeSkip(signal="loss", threshold=1e-6, max_skips=9)
    quiet_trainer(callback, AccumulationWindows(6, 2), max_steps=3).fit(Noted(), TinyData())
    means = [sum(losses[3 * i : 3 * i + 3]) / 3 for i in range(3)]
    assert [e.loss for e in callback.events] == pytest.approx(means, rel=1e-6)
    assert {(e.signal, e.cause) for e in callback.events} == {("loss", "threshold")}


def test_judging_the_loss_sees_what_the_norm_does_not_and_still_refuses_a_gradient_that_is_not_finite() -> None:
    class Shifted(TinyModule):
        """The loss of one step is larger by a constant: its gradient is as ever. Another has a bad gradient only."""

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if loss is None else loss + (50.0 if batch_idx == 6 else 0.0)

        def on_after_backward(self) -> None:
            if self.trainer.global_step == 8:
                next(self.parameters()).grad.fill_(math.nan)

    for signal, steps in (("grad_norm", [9]), ("loss", [7, 9]), ("both", [7, 9])):
        callback = strict(signal=signal, z_score=50.0)
        quiet_trainer(callback, max_steps=10).fit(Shifted(adamw(lr=1e-3)), TinyData())
        assert [e.step for e in callback.events] == steps, signal


def test_of_both_signals_the_threshold_is_that_of_the_norm() -> None:
    callback = GradSpikeSkip(threshold=1e9, signal="both")
    assert callback._detector.rules["grad_norm"].threshold == 1e9
    assert callback._detector.rules["loss"].threshold is None


def test_with_the_defaults_statistics_follow_the_run_and_nothing_is_skipped() -> None:
    norms: list[float] = []
    callback = GradSpikeSkip()
    note = Watch("on_before_optimizer_step", lambda t, *rest: norms.append(float(GradNorm.of(t).value)))  # type: ignore[arg-type]
    quiet_trainer(callback, note, max_steps=12).fit(TinyModule(adamw(lr=1e-3)), TinyData())
    window = callback.state_dict()["detector"]["windows"]["grad_norm"]
    assert sorted(window["values"]) == sorted(norms)
    assert min(norms) < window["running"] < max(norms)
    assert window["running"] != pytest.approx(norms[0])
    assert callback.events == []


def test_opts_rule_skips_every_step_whose_norm_is_above_one() -> None:
    norms: list[float] = []
    note = Watch("on_before_optimizer_step", lambda t, o: norms.append(float(GradNorm.of(t).value)))
    callback = GradSpikeSkip(threshold=1.0, z_score=None, max_skips=1000)
    quiet_trainer(callback, note, max_steps=30).fit(TinyModule(adamw(lr=1e-2)), TinyData())
    assert 0 < len(callback.events) < 30
    assert [e.step for e in callback.events] == [i for i, norm in enumerate(norms, 1) if norm > 1.0]


# -- never for ever ----------------------------------------------------------------------------------------------------


def test_a_run_of_nan_is_stopped_with_weights_as_they_were() -> None:
    states: dict[int, Any] = {}
    note = Watch("on_train_batch_end", lambda t, *rest: states.update({t.global_step: snapshot(t)}))
    callback = strict(max_skips=2)
    trainer = quiet_trainer(note, callback, max_steps=20)
    module = TinyModule(adamw(lr=1e-3), poison=dict.fromkeys(range(5, 20), math.nan))
    with pytest.raises(TooManySkips, match=r"step 8: more than max_skips=2 optimizer steps in a row .* go back"):
        trainer.fit(module, TinyData())
    assert trainer.global_step == 8
    assert_same_bits(states[8], states[5])
    assert [(e.skipped, e.stop) for e in callback.events] == [(True, False), (True, False), (True, True)]


def test_after_a_stop_the_same_objects_fit_on() -> None:
    trainer = quiet_trainer(callback := strict(max_skips=1), max_steps=20)
    module = TinyModule(adamw(lr=1e-3), poison={5: math.nan, 6: math.nan})
    with pytest.raises(TooManySkips):
        trainer.fit(module, TinyData())
    train_more(trainer, 4)
    trainer.fit(module, TinyData())
    assert (trainer.global_step, len(callback.events)) == (11, 2)


def test_a_shift_of_level_is_adapted_to() -> None:
    module = TinyModule(adamw(lr=1e-4), poison=dict.fromkeys(range(10, 60), 1e3))
    quiet_trainer(callback := strict(), max_steps=60, log_every_n_steps=0).fit(module, TinyData())
    assert [(e.step, e.skipped) for e in callback.events] == [(s, s < 16) for s in range(11, 17)]


# -- log ---------------------------------------------------------------------------------------------------------------


@both_kernels
def test_log_sees_the_same_events_and_the_run_is_bit_identical_to_one_without(fused: bool) -> None:
    def module() -> TinyModule:
        return TinyModule(adamw(lr=1e-6, fused=fused), poison={6: 1e4, 7: 1e4, 9: 1e5})

    runs = {}
    for name, callbacks in (
        ("without", []),
        ("log", [strict(action="log", schedule_on_skip="hold", max_skips=1)]),
        ("act", [strict(max_skips=1)]),
    ):
        trainer = quiet_trainer(*callbacks, max_steps=14)
        trainer.fit(module(), TinyData(resumes=False))
        runs[name] = (snapshot(trainer), callbacks)
    assert_same_bits(runs["log"][0], runs["without"][0])
    log, act = runs["log"][1][0], runs["act"][1][0]
    told = [[(e.step, e.skipped, e.cause) for e in c.events] for c in (log, act)]
    assert told[0] == told[1] == [(7, True, "z_score"), (8, False, "z_score"), *told[0][2:]]
    assert not log.skipped


def test_log_says_what_would_have_been_done_and_falls_silent_when_all_is_lost() -> None:
    module = TinyModule(adamw(), poison={6: math.nan})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(callback := strict(action="log", max_skips=2), max_steps=15)
        trainer.fit(module, TinyData())
    lines = [str(w.message) for w in caught if "GradSpikeSkip" in str(w.message)]
    assert lines == [
        f"GradSpikeSkip: step {step}: would have been skipped: gradient norm nan is not finite (non_finite){end}"
        for step, end in ((7, ""), (8, ""), (9, "; the run would have been stopped"))
    ]
    assert len(callback.events) == 9
    assert Progress.of(trainer).skipped == 0


@pytest.mark.parametrize(("at_cap", "spikes"), [("accept", 2), ("stop", 2), ("stop", 4)])
def test_what_would_have_been_skipped_is_no_skip_in_a_row_for_a_resume_that_acts(
    at_cap: Any, spikes: int, tmp_path: Path
) -> None:
    told: list[Event] = []
    hear = Watch("on_train_start", lambda t: Events.of(t).listeners.update(test=told.append))

    def run(action: Any, steps: int, path: Path, *others: Any, resume: Path | None = None) -> GradSpikeSkip:
        module = TinyModule(adamw(lr=1e-6), poison=dict.fromkeys(range(6, 12), 1e4))
        skip = strict(action=action, max_skips=2, at_cap=at_cap)
        trainer = quiet_trainer(*others, skip, max_steps=6 + steps)
        trainer.fit(module, TinyData(), ckpt_path=resume)
        trainer.save_checkpoint(path)
        return skip

    run("log", spikes, first := tmp_path / "a.ckpt")
    acting = run("act", spikes + 1, tmp_path / "b.ckpt", hear, resume=first)
    assert [(e.step, e.kind, e.evidence["acted"]) for e in told] == [(7 + spikes, "skipped_step", True)]
    assert acting.state_dict()["detector"]["consecutive"] == 1
    logging = run("log", spikes + 1, tmp_path / "c.ckpt", resume=first)
    whole = run("log", spikes + 1, tmp_path / "d.ckpt")
    assert logging.state_dict() == whole.state_dict(), "one that logs goes on counting"


def test_a_state_that_does_not_tell_skipped_from_logged_means_skipped() -> None:
    first, second = strict(), strict()
    state = first.state_dict()
    del state["acted"]
    state["detector"]["consecutive"] = state["log"]["in_row"] = 2
    second.load_state_dict(state)
    assert second.state_dict() == {**state, "acted": True}


# -- the schedule ------------------------------------------------------------------------------------------------------


class Scheduled(TinyModule):
    def __init__(self, make_scheduler: Any, config: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(adamw(), **options)
        self.make_scheduler, self.config = make_scheduler, config or {}
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": "step", **self.config}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def warmup_then_cosine(optimizer: Any) -> Any:
    s = torch.optim.lr_scheduler
    parts = [s.LinearLR(optimizer, 0.1, 1.0, 3), s.CosineAnnealingLR(optimizer, 10)]
    return s.SequentialLR(optimizer, parts, [3])


@pytest.mark.parametrize("make", [halving, warmup_then_cosine])
def test_hold_makes_the_schedule_a_function_of_the_steps_applied_and_advance_of_all(make: Any) -> None:
    rates = {}
    for name, poison, schedule in (("clean", {}, "advance"), ("hold", {2: math.nan, 4: math.nan, 5: math.nan}, "hold")):
        module = Scheduled(make, poison=poison)
        trainer = quiet_trainer(strict(schedule_on_skip=schedule), max_steps=9)
        trainer.fit(module, TinyData())
        rates[name] = module.rates
    clean = rates["clean"]
    assert rates["hold"] == [*clean[:3], clean[2], *clean[3:4], clean[3], clean[3], *clean[4:6]]
    assert [c.frequency for c in trainer.lr_scheduler_configs] == [1]
    advance = Scheduled(make, poison={2: math.nan, 4: math.nan})
    quiet_trainer(strict(), max_steps=9).fit(advance, TinyData())
    assert advance.rates == clean


def test_hold_holds_the_scheduled_position_by_what_the_skipped_windows_consumed() -> None:
    scheduled: list[Any] = []
    note = Watch("on_train_batch_start", lambda t, *rest: scheduled.append(tuple(Progress.of(t).scheduled)))
    trainer = quiet_trainer(
        strict(schedule_on_skip="hold"), AccumulationWindows(4, 2), note, max_steps=4, check_val_every_n_epoch=None
    )
    module = TinyModule()
    module.poison = {1: math.nan}
    trainer.fit(module, TinyData())
    # (steps, samples, tokens): two micro-batches a step, two samples of width four each
    assert scheduled == [(s, 4 * s, 16 * s) for s in (0, 0, 1, 1, 1, 1, 2, 2)]
    assert tuple(Progress.of(trainer).held) == (1, 4, 16)


def test_a_held_schedule_resumes_exactly(tmp_path: Path) -> None:
    def run(resume: Path | None = None, *callbacks: Any) -> tuple[Any, list[float]]:
        module = Scheduled(warmup_then_cosine, poison={2: math.nan, 4: math.nan})
        trainer = quiet_trainer(strict(schedule_on_skip="hold"), *callbacks, max_steps=8)
        trainer.fit(module, TinyData(), ckpt_path=resume)
        return snapshot(trainer), module.rates

    straight, rates = run()
    run(None, SaveAtSteps(tmp_path))
    for step in (2, 3, 5):
        end, tail = run(tmp_path / f"micro-{step}.ckpt")
        assert_same_bits(end, straight)
        assert tail == rates[step:]


def test_hold_refuses_a_scheduler_that_steps_every_nth_step_only() -> None:
    trainer = quiet_trainer(strict(schedule_on_skip="hold"), max_steps=2)
    with pytest.raises(MisconfigurationException, match=r"lr_scheduler frequency=3: .* set the frequency to 1, or"):
        trainer.fit(Scheduled(halving, {"frequency": 3}), TinyData())


# -- what the host learns late -----------------------------------------------------------------------------------------


@pytest.fixture
def lag(monkeypatch: pytest.MonkeyPatch) -> int:
    """The ring is late on the CPU as it is on a GPU."""
    push = EventRing.push

    def late(self: EventRing, key: Any, row: torch.Tensor) -> None:
        push(self, key, row)
        self.lag = 3

    monkeypatch.setattr(EventRing, "push", late)
    return 3


def test_events_hold_and_stop_come_exactly_lag_steps_late(lag: int) -> None:
    known: list[int] = []
    callback = strict(schedule_on_skip="hold", max_skips=1)
    note = Watch("on_train_batch_end", lambda t, *rest: known.append(len(callback.events)))
    trainer = quiet_trainer(note, callback, max_steps=20)
    module = Scheduled(halving, poison={2: math.nan, 9: math.nan, 10: math.nan})
    with pytest.raises(TooManySkips, match="step 14:"):
        trainer.fit(module, TinyData())
    assert known == [0] * 5 + [1] * 7 + [2, 3]
    powers = [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11, 11]  # held at step 3 + lag and at 10 + lag
    assert module.rates == [0.05 * 0.5**p for p in powers]


def test_a_hold_that_is_to_come_is_not_made_by_a_resume_that_logs(lag: int, tmp_path: Path) -> None:
    def rates(*callbacks: Any, resume: Path | None = None) -> list[float]:
        module = Scheduled(halving, poison={2: math.nan})
        quiet_trainer(*callbacks, max_steps=8).fit(module, TinyData(), ckpt_path=resume)
        return module.rates

    rates(strict(schedule_on_skip="hold"), SaveAtSteps(tmp_path))
    logged = rates(strict(schedule_on_skip="hold", action="log"), resume=tmp_path / "micro-4.ckpt")
    assert logged == rates(Progress(), resume=tmp_path / "micro-4.ckpt")


def test_all_is_known_when_the_fit_ends_or_fails(lag: int) -> None:
    for failing in (False, True):
        callback = strict()

        def fail(trainer: Any, *rest: Any, failing: bool = failing) -> None:
            if failing and trainer.global_step == 6:
                raise KeyError("on purpose")

        module = TinyModule(poison={5: math.nan})
        try:
            quiet_trainer(callback, Watch("on_train_batch_end", fail), max_steps=6).fit(module, TinyData())
        except KeyError:
            assert failing
        assert [e.step for e in callback.events] == [6]


def test_a_save_while_rows_are_on_their_way_changes_nothing_and_resumes_exactly(lag: int, tmp_path: Path) -> None:
    def run(resume: Path | None = None, *callbacks: Any) -> Any:
        module = Scheduled(warmup_then_cosine, poison={2: math.nan, 4: math.nan, 6: 1e4})
        trainer = quiet_trainer(callback := strict(schedule_on_skip="hold"), *callbacks, max_steps=12)
        trainer.fit(module, TinyData(), ckpt_path=resume)
        return [snapshot(trainer), repr(callback.state_dict()), repr(Progress.of(trainer).state_dict())]

    straight = run()
    assert_same_bits(run(None, SaveAtSteps(tmp_path)), straight)
    for step in (2, 3, 4, 5, 7):
        assert_same_bits(run(tmp_path / f"micro-{step}.ckpt"), straight, f"from {step}")
    saved = torch.load(tmp_path / "micro-3.ckpt", weights_only=True)["callbacks"]["GradSpikeSkip"]["log"]
    assert [e[0] for e in saved["events"]] == [3], "flushed before the save"
    assert saved["due"] == [[6, 1, 2, 8]]


def test_what_a_save_brings_to_the_host_is_told_before_it_and_never_again(lag: int, tmp_path: Path) -> None:
    def told(folder: str, resume: Path | None = None, *callbacks: Any) -> list[Event]:
        module = TinyModule(poison={2: math.nan, 4: math.nan})
        trainer = quiet_trainer(strict(), *callbacks, max_steps=7, default_root_dir=tmp_path / folder)
        trainer.fit(module, TinyData(), ckpt_path=resume)
        path = tmp_path / folder / "events.jsonl"
        return read_events(path) if path.exists() else []

    straight = told("straight")
    assert [(e.kind, e.step, e.samples, e.evidence["acted"]) for e in straight] == [
        ("skipped_step", 3, [4, 6], True),
        ("skipped_step", 5, [8, 10], True),
    ]
    known: list[int] = []
    path = tmp_path / "saving" / "events.jsonl"
    count = Watch("on_train_batch_end", lambda *_: known.append(len(read_events(path)) if path.exists() else 0))
    assert repr(told("saving", None, SaveAtSteps(tmp_path), count)) == repr(straight)  # NaN equals no NaN
    assert known == [0, 0, 1, 1, 2, 2, 2]
    for step, rest in ((2, straight), (3, straight[1:]), (4, straight[1:]), (5, []), (7, [])):
        assert repr(told(f"from-{step}", tmp_path / f"micro-{step}.ckpt")) == repr(rest), step


# -- state -------------------------------------------------------------------------------------------------------------

WINDOW = 3


@pytest.mark.parametrize(("fused", "signal"), [(True, "both"), (False, "grad_norm")])
def test_resumes_bit_for_bit_around_its_skips(fused: bool, signal: str, tmp_path: Path) -> None:
    def run(resume: Path | None = None, *callbacks: Any) -> Any:
        module = TinyModule(adamw(lr=1e-3, fused=fused), dropout=0.3, poison={5: math.nan, 6: 1e4, 8: 5e3})
        own = [callback := strict(signal=signal), AccumulationWindows(2 * WINDOW, 2), StepSeed(1), GradClip(0.05)]
        trainer = quiet_trainer(*own, *callbacks, max_steps=10, log_every_n_steps=3)
        trainer.fit(module, TinyData(), ckpt_path=resume)
        assert [e.step for e in callback.events] == [6, 7, 9]
        return [snapshot(trainer), repr([c.state_dict() for c in own])]

    straight = run()
    assert_same_bits(run(None, SaveAtSteps(tmp_path)), straight)
    points = ["start", *(f"micro-{WINDOW * step + more}" for step, more in ((5, 2), (6, 0), (7, 2)))]
    for point in points:
        torch.manual_seed(1234)
        assert_same_bits(run(tmp_path / f"{point}.ckpt"), straight, point)


def test_a_spike_at_the_first_step_after_a_resume_is_seen(tmp_path: Path) -> None:
    first = quiet_trainer(strict(), max_steps=8)
    first.fit(TinyModule(adamw(lr=1e-3)), TinyData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(callback := strict(), max_steps=9)
    second.fit(TinyModule(adamw(lr=1e-3), poison={8: 1e4}), TinyData(), ckpt_path=tmp_path / "a.ckpt")
    assert [e.step for e in callback.events] == [9]


def test_a_changed_window_keeps_the_newest_values(tmp_path: Path) -> None:
    first = quiet_trainer(strict(), max_steps=8)
    first.fit(TinyModule(adamw(lr=1e-3)), TinyData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    callback = strict(window=5, signal="both", z_score=None)
    quiet_trainer(callback, max_steps=8).fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["GradSpikeSkip"]["detector"]["windows"]
    assert callback.state_dict()["detector"]["windows"]["grad_norm"]["values"] == state["grad_norm"]["values"][-5:]


# -- what it says ------------------------------------------------------------------------------------------------------


def test_logs_the_score_and_the_counts_at_logging_steps(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    module = TinyModule(adamw(lr=1e-3), poison={7: math.nan, 9: 1e4, 10: 1e4})
    quiet_trainer(strict(), max_steps=12, logger=logger, log_every_n_steps=4).fit(module, TinyData())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    columns = [header.split(",").index(f"stability/{name}") for name in ("spike_score", "spikes", "overflows")]
    found = [[float(row.split(",")[c]) for c in columns] for row in rows if row.split(",")[columns[0]]]
    assert [r[1:] for r in found] == [[0, 0], [1, 0], [3, 0]]
    assert [found[0][0], found[1][0]] == [0.0, math.inf]  # warming up; not finite
    assert 0 < found[2][0] < 1


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (adamw(fused=False), r"AdamW is not fused, so every step waits .* give it fused=True to avoid it"),
        (lambda p: torch.optim.RMSprop(p), r"RMSprop is not fused, .* take one with a fused kernel, such as AdamW"),
    ],
)
def test_one_line_tells_how_to_avoid_the_wait_of_an_optimizer_that_is_not_fused(make: Any, line: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(strict(), max_steps=2).fit(TinyModule(make), TinyData())
    (told,) = [str(w.message) for w in caught if "GradSpikeSkip" in str(w.message)]
    assert re.search(line, told)


def test_a_fused_optimizer_and_a_run_that_is_only_watched_get_no_such_line() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="GradSpikeSkip")
        quiet_trainer(strict(), max_steps=2).fit(TinyModule(), TinyData())
        quiet_trainer(strict(action="log"), max_steps=2).fit(TinyModule(adamw(fused=False)), TinyData())


def test_a_line_for_every_skip_names_step_value_limit_and_cause() -> None:
    module = TinyModule(adamw(lr=1e-3), poison={6: 1e4})
    with pytest.warns(UserWarning, match=r"step 7: skipped: gradient norm \d[\d.e+]+ is above \d[\d.]+ \(z_score\)$"):
        quiet_trainer(strict(), max_steps=8).fit(module, TinyData())


def test_all_broken_arguments_are_named_at_once() -> None:
    with pytest.raises(MisconfigurationException) as caught:
        GradSpikeSkip(-1.0, 0.0, 1.0, "both", 0, 2, 0)
    assert str(caught.value).split("\n") == [
        "`GradSpikeSkip(threshold=-1.0)`: must be a finite number > 0, or None.",
        "`GradSpikeSkip(z_score=0.0)`: must be a finite number > 0, or None.",
        "`GradSpikeSkip(ratio=1.0)`: must be a finite number > 1, or None.",
        "`GradSpikeSkip(window=0)`: must be at least 1.",
        "`GradSpikeSkip(warmup_steps=2)`: must lie between 1 and window=0.",
        "`GradSpikeSkip(max_skips=0)`: must be at least 1.",
    ]


def test_manual_optimization_is_refused() -> None:
    class Manual(TinyModule):
        automatic_optimization = False

    with pytest.raises(MisconfigurationException, match=r"`Manual.automatic_optimization=False`: .* use automatic"):
        quiet_trainer(GradSpikeSkip()).fit(Manual(), TinyData())
