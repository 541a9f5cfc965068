"""The rate itself; other options are in test_override_options.py, what a checkpoint has in test_configured.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scheduled_fit import SCHEDULERS, Rates, Scheduled, fit, take_what_is_printed
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot
from torch.optim import lr_scheduler as schedulers

from lit_stable.callbacks import BatchSizeWarmup, Events, LROverride, Progress
from lit_stable.callbacks.progress import Mark
from lit_stable.optim.schedule import LRSchedule

every_scheduler = pytest.mark.parametrize("name", SCHEDULERS)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return take_what_is_printed(monkeypatch)


@every_scheduler
def test_a_factor_on_resume_is_exact_and_applied_once_over_three_resumes(name: str, tmp_path: Path) -> None:
    """Cases D2, D4, D6, D10: from the first resumed step on, for good, and not again at each resume."""
    checkpoint = tmp_path / "a.ckpt"
    _, plain = fit(Scheduled(SCHEDULERS[name]), steps=12)
    _, first = fit(Scheduled(SCHEDULERS[name]), steps=4, save=checkpoint)
    used = first.used
    for stop in (6, 9, 12):
        _, rates = fit(
            Scheduled(SCHEDULERS[name]), LROverride(factor=0.5), steps=stop, resume=checkpoint, save=checkpoint
        )
        used = used + rates.used
    assert used == [[lr * (0.5 if k >= 4 else 1) for lr in lrs] for k, lrs in enumerate(plain.used)]


@every_scheduler
def test_a_new_peak_scales_any_schedule_and_keeps_the_groups_ratio(name: str) -> None:
    _, plain = fit(Scheduled(SCHEDULERS[name]), steps=6)
    _, rates = fit(Scheduled(SCHEDULERS[name]), LROverride(start=2, peak=0.03), steps=6)
    assert rates.used[:2] == plain.used[:2]
    torch.testing.assert_close(torch.tensor(rates.used[2:]), 0.3 * torch.tensor(plain.used[2:]))


@pytest.mark.parametrize(("unit", "start"), [("steps", 3), ("samples", 6), ("tokens", 24)])
def test_begins_with_the_step_that_opens_at_the_start_in_its_unit(unit: Any, start: int) -> None:
    _, rates = fit(Scheduled(), LROverride(start=start, unit=unit, factor=0.5), steps=5)
    assert [lrs[0] for lrs in rates.used] == [0.1] * 3 + [0.05] * 2


def test_a_whole_schedule_replaces_the_old_one(tmp_path: Path) -> None:
    points = [(0, 0.0), (2, 0.4), (6, 0.0)]
    _, rates = fit(Scheduled(SCHEDULERS["SequentialLR"]), LROverride(schedule=points), steps=7)
    expected = [[lr, lr / 5] for lr in (0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0)]
    torch.testing.assert_close(torch.tensor(rates.used), torch.tensor(expected))


BLOOM = LRSchedule(peak=6e-5, floor=6e-6, warmup=216_320, horizon=126_953_125, unit="samples")


def steps_of(samples: int) -> Any:
    class Large(Scheduled):
        """Every step consumes so many samples; the rate is a function of the samples before it."""

        def count_batch(self, batch: torch.Tensor) -> tuple[int, int]:
            return samples, samples

    return lambda: Large(lambda o: schedulers.LambdaLR(o, lambda k: BLOOM.lr(k * samples) / BLOOM.peak), lr=6e-5)


def test_the_golden_override_of_floor_and_horizon_on_resume(tmp_path: Path) -> None:
    """BNB-6 of tr8b-104B: at 1,519,744 samples 5.9986e-5 became 5.8415e-5."""
    make = steps_of(1_519_744 // 2)
    override = {"unit": "samples", "floor": 6e-7, "horizon": 12_695_312, "warmup": 216_320}
    fit(make(), steps=2, save=tmp_path / "a.ckpt")
    _, rates = fit(make(), LROverride(**override), steps=3, resume=tmp_path / "a.ckpt")  # type: ignore[arg-type]
    assert f"{rates.outside[0][0]:.4e} -> {rates.used[0][0]:.4e}" == "5.9986e-05 -> 5.8415e-05"
    assert rates.used[0][1] == pytest.approx(rates.used[0][0] / 5)


def test_gptmodules_own_schedule_is_overridden_and_bit_equal_when_resumed(tmp_path: Path) -> None:
    from tiny_gpt_run import SaveEveryMicroBatch, equal_bits
    from tiny_gpt_run import fit as fit_gpt

    def run(**options: Any) -> Any:
        rates = Rates()
        others = options.pop("callbacks", ())
        done = fit_gpt(steps=6, callbacks=(LROverride(start=24, unit="samples", peak=2e-3), rates, *others), **options)
        return done, rates

    straight, rates = run(callbacks=(SaveEveryMicroBatch(tmp_path),))
    schedule = straight.module.schedule
    expected = [schedule.lr(8 * k) * (0.2 if k >= 3 else 1) for k in range(6)]
    assert [lrs[0] for lrs in rates.used] == pytest.approx(expected, rel=1e-12)
    for point in (8, 14, 18):  # four micro-batches a step: before the override, in it, in mid-window
        again, _ = run(ckpt_path=tmp_path / f"m{point}.ckpt")
        assert equal_bits(again.weights, straight.weights), point


def test_other_arguments_are_another_override_that_begins_anew_and_does_not_compound(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    fit(Scheduled(), LROverride(factor=0.5), steps=2, save=checkpoint)
    second = LROverride(factor=0.25)
    _, rates = fit(Scheduled(), second, steps=4, resume=checkpoint, save=checkpoint)
    assert [lrs[0] for lrs in rates.used] == [0.025] * 2
    assert second.state_dict()["begun"] == [2, 4, 16]
    trainer, rates = fit(Scheduled(), steps=5, resume=checkpoint)
    assert rates.used[0][0] == 0.1, "taken away, nothing of it is left"
    assert Progress.of(trainer).steps == 5


def test_counters_and_data_go_on_as_if_there_were_no_override(tmp_path: Path) -> None:
    fit(Scheduled(), steps=3, save=tmp_path / "a.ckpt")
    trainer, _ = fit(Scheduled(), LROverride(factor=0.0), steps=5, resume=tmp_path / "a.ckpt")
    assert (trainer.global_step, *Progress.of(trainer).mark) == (5, 5, 10, 40)


@pytest.mark.parametrize("saved_at", [1, 3, 4, 8])
def test_over_a_batch_ramp_the_rate_is_a_function_of_the_samples_after_any_resume(
    saved_at: int, tmp_path: Path
) -> None:
    """Steps open at 0, 4, 8, 16, 28 samples; a save in mid-window is of the step before."""

    def run(*others: Any, resume: Any = None) -> tuple[Any, Rates]:
        ramp = BatchSizeWarmup("4 for 2 steps then 8 for 1 steps then 12", 12, 2, lr_factor="linear")
        override = LROverride(unit="samples", schedule=[(0, 0.0), (40, 0.4)], start=8)
        return fit(Scheduled(), ramp, override, *others, steps=5, resume=resume)

    straight, rates = run(SaveAtSteps(tmp_path))
    batches = (4, 4, 8, 12, 12)
    asked = [0.1, 0.1, 0.08, 0.16, 0.28]
    expected = [lr * batch / 12 for lr, batch in zip(asked, batches, strict=True)]
    assert [lrs[0] for lrs in rates.used] == pytest.approx(expected, rel=1e-12)
    resumed, tail = run(resume=tmp_path / f"micro-{saved_at}.ckpt")
    assert tail.used == rates.used[-len(tail.used) :]
    assert_same_bits(snapshot(resumed), snapshot(straight))


# -- log, refusals ---------------------------------------------------------------------------------------------------


def test_log_changes_no_bit_and_tells_the_same_event(tmp_path: Path, printed: list[str]) -> None:
    runs = []
    for callbacks in ([], [LROverride(start=2, factor=0.5, betas=(0.0, 0.9), dropout=0.3, action="log")]):
        torch.manual_seed(0)
        trainer = quiet_trainer(*callbacks, max_steps=4)  # type: ignore[arg-type]
        trainer.fit(Scheduled(SCHEDULERS["SequentialLR"]), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])
    assert len(printed) == 1
    assert "at 2 steps would override lr 0.07 -> 0.035, betas -> (0.0, 0.9), dropout 0.0 -> 0.3" in printed[0]


def test_behind_a_run_that_logs_its_first_acting_step_is_an_event(tmp_path: Path) -> None:
    """And only that one: not again behind another run that logs."""
    told: list[tuple[int, bool]] = []
    hear = Watch("on_train_start", lambda t: Events.of(t).listeners.update(test=note))

    def note(event: Any) -> None:
        told.append((event.step, event.evidence["acted"]))

    for stop, action in ((4, "log"), (6, "log"), (8, "act"), (10, "log"), (12, "act")):
        trainer = quiet_trainer(LROverride(start=2, factor=0.5, action=action), hear, max_steps=stop)  # type: ignore[arg-type]
        trainer.fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "a.ckpt" if stop > 4 else None)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert told == [(3, False), (7, True)]


def test_a_state_that_does_not_tell_who_told_means_one_that_acted() -> None:
    first, second = LROverride(factor=0.5), LROverride(factor=0.5)
    first.begin(Mark(2, 4, 16), [0.1])
    state = {**first.state_dict(), "told": True}
    del state["acted"]
    second.load_state_dict(state)
    assert second.state_dict() == {**state, "acted": True}


def test_says_old_and_new_once_as_read_back_from_the_optimizer(printed: list[str]) -> None:
    fit(Scheduled(weight_decay=0.1), LROverride(start=1, factor=0.5, weight_decay=0.01), steps=4)
    assert printed == ["LROverride: at 1 steps overrides lr 0.1 -> 0.05, weight_decay [0.1, 0.0] -> [0.01, 0.0]"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`LROverride`: nothing to override; give factor"),
        ({"start": -1, "factor": 0.5}, "`LROverride`: start=-1: must be 0 or more"),
        ({"factor": -1.0}, "`LROverride`: factor=-1.0: must be a finite number"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: must be a finite number >= 0"),
        ({"weight_decay": math.inf}, "weight_decay=inf: must be a finite number >= 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\): must be two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\): must be two numbers in \[0, 1\)"),
        ({"eps": 0.0}, "eps=0.0: must be a finite number > 0"),
        ({"eps": math.inf}, "eps=inf: must be a finite number > 0"),
        ({"clip": 0.0}, "clip=0.0: must be a finite number > 0"),
        ({"clip": math.inf}, "clip=inf: must be a finite number > 0"),
        ({"dropout": 1.0}, r"dropout=1.0: must lie in \[0, 1\)"),
        ({"eps": 0.0, "factor": math.inf}, "factor=inf(.|\n)*eps=0.0"),
    ],
)
def test_wrong_arguments_are_refused_all_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        LROverride(**options)


def test_rates_that_are_all_zero_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"own rates are \[0.0\].*make the optimizer with"):
        fit(TinyModule(adamw(lr=0.0)), LROverride(peak=0.1), steps=1)
