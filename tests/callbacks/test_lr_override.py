from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scheduled_fit import SCHEDULERS, Rates, Scheduled
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot
from torch.optim import lr_scheduler as schedulers

from lit_stable.callbacks import BatchSizeWarmup, EffectiveLR, GradClip, LROverride, Progress, global_grad_norm
from lit_stable.callbacks import configured as configured_module
from lit_stable.callbacks import events as events_module
from lit_stable.callbacks import lr_override as override_module
from lit_stable.optim.schedule import LRSchedule

every_scheduler = pytest.mark.parametrize("name", SCHEDULERS)


def fit(module: Any, *callbacks: Any, steps: int, resume: Any = None, save: Any = None) -> tuple[Any, Rates]:
    rates = Rates()
    trainer = quiet_trainer(EffectiveLR(), *callbacks, rates, max_steps=steps)
    trainer.fit(module, TinyData(), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return trainer, rates


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for module in (override_module, configured_module, events_module):
        monkeypatch.setattr(module, "rank_zero_info", lines.append)
    monkeypatch.setattr(configured_module, "rank_zero_warn", lines.append)
    return lines


# -- the rate --------------------------------------------------------------------------------------------------------


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


def test_beside_a_ramp_the_overridden_rate_is_a_function_of_samples_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    from tiny_gpt_run import SaveEveryMicroBatch, equal_bits
    from tiny_gpt_run import fit as fit_gpt

    override: dict[str, Any] = {"start": 8, "unit": "samples", "peak": 2e-3, "horizon": 40, "shape": "linear"}

    def run(*others: Any, **options: Any) -> Any:
        rates = Rates()
        ramp = BatchSizeWarmup("4 for 2 steps", global_batch=8, micro_batch=2, lr_factor="sqrt")
        done = fit_gpt(steps=5, windows=ramp, callbacks=(LROverride(**override), rates, *others), **options)
        return done, [lrs[0] for lrs in rates.used]

    straight, rates = run(SaveEveryMicroBatch(tmp_path, only=(3, 4, 6)))
    schedule = straight.module.schedule
    root = math.sqrt(0.5)
    expected = [schedule.lr(0) * root, schedule.lr(4) * root, *(2e-3 * (1 - samples / 40) for samples in (8, 16, 24))]
    assert rates == pytest.approx(expected, rel=1e-12)
    for point, steps_done in ((3, 1), (4, 2), (6, 2)):  # before the override, where it begins, in a window of it
        again, resumed = run(ckpt_path=tmp_path / f"m{point}.ckpt")
        assert resumed == rates[steps_done:]
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


# -- options ---------------------------------------------------------------------------------------------------------


def test_weight_decay_changes_where_there_is_any_by_its_exact_ratio() -> None:
    class NoGradient(Scheduled):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return 0.0 * self.net(batch).sum()

    module = NoGradient(lr=0.1, weight_decay=0.5, fused=False)
    decayed, kept = module.net[0].weight.detach().clone(), module.net[3].weight.detach().clone()
    trainer, _ = fit(module, LROverride(start=2, weight_decay=0.05), steps=3)
    torch.testing.assert_close(module.net[0].weight.detach(), decayed * 0.95 * 0.95 * 0.995, rtol=1e-6, atol=0)
    assert torch.equal(module.net[3].weight.detach(), kept)
    assert [g["weight_decay"] for g in trainer.optimizers[0].param_groups] == [0.5, 0.0]


def test_another_weight_decay_is_the_same_over_three_resumes(tmp_path: Path) -> None:
    def run(stop: int, *callbacks: Any, resume: Any = None) -> Any:
        used: list[list[float]] = []
        read = Watch("on_train_batch_end", lambda t, *rest: used.append(EffectiveLR.of(t).used["weight_decay"]))
        module = Scheduled(weight_decay=0.5)
        override = LROverride(start=2, weight_decay=0.05)
        trainer, _ = fit(module, override, read, *callbacks, steps=stop, resume=resume, save=tmp_path / "a.ckpt")
        return used, snapshot(trainer)

    straight, bits = run(8)
    used, resume = [], None
    for stop in (1, 3, 6, 8):
        some, last = run(stop, resume=resume)
        used, resume = used + some, tmp_path / "a.ckpt"
    assert used == straight == [[0.5, 0.0]] * 2 + [[0.05, 0.0]] * 6
    assert_same_bits(last, bits)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
def test_betas_and_eps_beat_the_restored_ones_as_read_back_from_the_optimizer(fused: bool, tmp_path: Path) -> None:
    """The SGD-like Adam (beta1 = 0, eps = 1): upstream the old betas came back from the checkpoint."""
    fit(TinyModule(adamw(betas=(0.9, 0.95), fused=fused)), steps=3, save=tmp_path / "a.ckpt")
    used: dict[str, Any] = {}
    read = Watch("on_before_optimizer_step", lambda t, o: used.update(betas=o.param_groups[0]["betas"]))
    override = LROverride(betas=(0.0, 0.95), eps=1.0, weight_decay=0.0)
    module = TinyModule(adamw(betas=(0.9, 0.95), fused=fused, weight_decay=0.1))
    trainer, _ = fit(module, override, read, steps=4, resume=tmp_path / "a.ckpt")
    assert used["betas"] == (0.0, 0.95)
    effective = EffectiveLR.of(trainer)
    assert (effective.used["betas"], effective.used["eps"]) == ([(0.0, 0.95)], [1.0])
    assert trainer.optimizers[0].param_groups[0]["betas"] == (0.9, 0.95)
    # With beta1 = 0 the first moment is the last gradient itself.
    state = trainer.optimizers[0].state[module.net[0].weight]
    torch.testing.assert_close(state["exp_avg"], module.net[0].weight.grad)


def test_options_changed_in_the_code_are_written_over_restored_ones_and_printed(
    tmp_path: Path, printed: list[str]
) -> None:
    fit(TinyModule(adamw(weight_decay=0.1)), steps=2, save=tmp_path / "a.ckpt")
    trainer, _ = fit(
        TinyModule(adamw(weight_decay=0.01, betas=(0.8, 0.9))),
        LROverride(factor=0.5),
        steps=3,
        resume=tmp_path / "a.ckpt",
    )
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.01
    assert "LROverride: group 0 weight_decay 0.1 -> 0.01" in printed
    assert "LROverride: group 0 betas [0.9, 0.999] -> [0.8, 0.9]" in printed


def test_dropout_changes_in_train_mode_alone_and_is_put_back() -> None:
    rates: list[float] = []
    watch = Watch("on_train_batch_end", lambda t, *rest: rates.append(t.lightning_module.net[2].p))
    module = TinyModule(dropout=0.0)
    fit(module, LROverride(start=2, dropout=0.5), watch, steps=4)
    assert rates == [0.0, 0.0, 0.5, 0.5]
    assert module.net[2].p == 0.0
    module.net[2].p = 0.5
    x = torch.ones(4, 4)
    assert torch.equal(module.eval().net(x), module.net(x))
    assert not torch.equal(module.train().net(x), module.net(x))


@pytest.mark.parametrize("weight_decay", [0.05, 0.0])
def test_a_decay_changed_on_resume_is_the_same_over_three_resumes(weight_decay: float, tmp_path: Path) -> None:
    checkpoint, used = tmp_path / "a.ckpt", []
    fit(Scheduled(weight_decay=0.5), steps=2, save=checkpoint)
    note = Watch("on_train_batch_end", lambda t, *rest: used.append(EffectiveLR.of(t).used["weight_decay"]))
    for stop in (3, 5, 6):
        override = LROverride(weight_decay=weight_decay)
        trainer, _ = fit(Scheduled(weight_decay=0.5), override, note, steps=stop, resume=checkpoint, save=checkpoint)
        assert [g["weight_decay"] for g in trainer.optimizers[0].param_groups] == [0.5, 0.0]
    assert used == [[weight_decay, 0.0]] * 4


def clipped_norms(override: Any, *callbacks: Any, steps: int, resume: Any = None, save: Any = None) -> list[float]:
    """Norm of the gradients, far above any limit before, that each step took."""
    norms: list[float] = []
    note = lambda t, o: norms.append(float(global_grad_norm(t.lightning_module.parameters())))  # noqa: E731
    watch = Watch("on_before_optimizer_step", note)
    module = TinyModule(adamw(fused=False), poison=dict.fromkeys(range(steps), 1e4))
    fit(module, *callbacks, *([override] if override else []), watch, steps=steps, resume=resume, save=save)
    return norms


@pytest.mark.parametrize("stages", [None, [{"from": 3, "max_norm": 1.0}]], ids=["fixed", "staged"])
def test_a_clipping_norm_changes_at_a_step_whatever_was_in_force(stages: Any) -> None:
    """Cases O12 and O15: 2.5, then 1.5."""
    clip = GradClip(2.5, schedule=stages)
    assert clipped_norms(LROverride(start=2, clip=1.5), clip, steps=4) == pytest.approx([2.5, 2.5, 1.5, 1.5], rel=1e-5)
    assert clip.overriding is None, "taken away with the fit"


def test_a_clipping_norm_changes_on_resume_and_stays_over_three(tmp_path: Path, printed: list[str]) -> None:
    """Case B12: 1.0 -> 0.3 where the run is resumed."""
    checkpoint = tmp_path / "a.ckpt"
    norms = clipped_norms(None, GradClip(1.0), steps=2, save=checkpoint)
    for stop in (3, 5, 6):
        norms += clipped_norms(LROverride(clip=0.3), GradClip(1.0), steps=stop, resume=checkpoint, save=checkpoint)
    assert norms == pytest.approx([1.0] * 2 + [0.3] * 4, rel=1e-5)
    assert printed == [f"LROverride: at {step} steps overrides clip 1.0 -> 0.3" for step in (2, 3, 5)]
    assert clipped_norms(None, GradClip(1.0), steps=7, resume=checkpoint) == pytest.approx([1.0], rel=1e-5)


def test_a_clipping_norm_that_is_only_logged_clips_nothing(printed: list[str]) -> None:
    override = LROverride(start=1, clip=0.3, action="log")
    assert clipped_norms(override, GradClip(1.0), steps=2) == pytest.approx([1.0] * 2, rel=1e-5)
    assert printed == ["LROverride: at 1 steps would override clip -> 0.3"]


def test_a_clipping_norm_without_a_clip_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`LROverride\(clip=0.3\)`: no `GradClip` .* add one"):
        fit(TinyModule(), LROverride(clip=0.3), steps=1)


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


# -- what a checkpoint brings along ----------------------------------------------------------------------------------


def cosine(horizon: int) -> Any:
    return lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 3), schedulers.CosineAnnealingLR(o, horizon)], [3]
    )


BEFORE_AND_AFTER = {
    "base rates": ((None, 0.1), (None, 0.02)),
    "peak of a cosine": ((SCHEDULERS["CosineAnnealingLR"], 0.1), (SCHEDULERS["CosineAnnealingLR"], 0.02)),
    "horizon inside SequentialLR": ((cosine(6), 0.1), (cosine(40), 0.1)),
    "function of LambdaLR": (
        (SCHEDULERS["LambdaLR"], 0.1),
        (lambda o: schedulers.LambdaLR(o, lambda k: 1 / (k + 2)), 0.1),
    ),
    "length of a cycle": (
        (lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=6), 0.1),
        (lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=12), 0.1),
    ),
}
changed = pytest.mark.parametrize("before_and_after", BEFORE_AND_AFTER.values(), ids=BEFORE_AND_AFTER)
NOT_YET = 99  # a start beyond the run: only what happens on resume is seen


@changed
def test_changed_hyperparameters_are_refused_by_default(before_and_after: Any, tmp_path: Path) -> None:
    before, after = before_and_after
    fit(Scheduled(*before), LROverride(NOT_YET, factor=0.5), steps=4, save=tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationException, match=r"trained with other hyper-parameters \(.* now"):
        fit(Scheduled(*after), LROverride(NOT_YET, factor=0.5), steps=6, resume=tmp_path / "a.ckpt")


@changed
def test_override_follows_the_code_from_the_first_resumed_step_on(before_and_after: Any, tmp_path: Path) -> None:
    """Cases D7 and D8: as if the run had had the new schedule from its first step on."""
    before, after = before_and_after
    checkpoint = tmp_path / "a.ckpt"
    _, wanted = fit(Scheduled(*after), steps=9)
    fit(Scheduled(*before), LROverride(NOT_YET, factor=0.5), steps=4, save=checkpoint)
    used: list[list[float]] = []
    for stop in (5, 7, 9):
        override = LROverride(NOT_YET, factor=0.5, on_conflict="override")
        _, rates = fit(Scheduled(*after), override, steps=stop, resume=checkpoint, save=checkpoint)
        used += rates.used
    assert used == wanted.used[4:]


@changed
def test_checkpoint_follows_the_checkpoint_except_for_functions(before_and_after: Any, tmp_path: Path) -> None:
    before, after = before_and_after
    checkpoint = tmp_path / "a.ckpt"
    _, wanted = fit(Scheduled(*before), steps=6)
    fit(Scheduled(*before), LROverride(NOT_YET, factor=0.5), steps=4, save=checkpoint)
    override = LROverride(NOT_YET, factor=0.5, on_conflict="checkpoint")
    _, rates = fit(Scheduled(*after), override, steps=6, resume=checkpoint)
    if before is BEFORE_AND_AFTER["function of LambdaLR"][0]:
        assert rates.used[0] == wanted.used[4]  # restored; the code's function takes over with the scheduler's step
        assert rates.used[1][0] == pytest.approx(0.1 / 7)
    else:
        assert rates.used == wanted.used[4:]


def test_a_function_that_a_checkpoint_cannot_hold_is_told(tmp_path: Path, printed: list[str]) -> None:
    (before, after), checkpoint = BEFORE_AND_AFTER["function of LambdaLR"], tmp_path / "a.ckpt"
    fit(Scheduled(*before), LROverride(NOT_YET, factor=0.5), steps=2, save=checkpoint)
    fit(Scheduled(*after), LROverride(NOT_YET, factor=0.5, on_conflict="checkpoint"), steps=3, resume=checkpoint)
    assert any("a LambdaLR's function is in no checkpoint" in line for line in printed)


def test_a_table_that_ends_is_sampled_as_far_as_it_goes() -> None:
    table = [1.0, 0.5, 0.25, 0.125, 0.1]
    trainer, _ = fit(
        Scheduled(lambda o: schedulers.LambdaLR(o, lambda k: table[k])), LROverride(start=1, factor=0.5), steps=3
    )
    override = next(c for c in trainer.callbacks if isinstance(c, LROverride))  # type: ignore[attr-defined]
    assert override.state_dict()["recorded"] == {"LambdaLR lr_lambda 0": [1.0, 0.5, 0.25, 0.1]} | {
        "LambdaLR lr_lambda 1": [1.0, 0.5, 0.25, 0.1]
    }


def test_a_rate_without_a_scheduler_and_without_a_record_is_told(tmp_path: Path, printed: list[str]) -> None:
    """Case D2 in a checkpoint that never had the callback: who sets the rate is not known there."""
    fit(Scheduled(lr=0.1), steps=2, save=tmp_path / "a.ckpt")
    _, rates = fit(Scheduled(lr=0.02), LROverride(NOT_YET, factor=0.5), steps=3, resume=tmp_path / "a.ckpt")
    assert rates.used[0][0] == 0.1
    assert any("restored the rates [0.1, 0.02] and the code has [0.02, 0.004]" in line for line in printed)
    override = LROverride(NOT_YET, factor=0.5, on_conflict="override")
    _, rates = fit(Scheduled(lr=0.02), override, steps=3, resume=tmp_path / "a.ckpt")
    assert rates.used[0][0] == 0.02


def test_a_new_peak_is_relative_to_the_rates_that_are_followed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    fit(Scheduled(lr=0.1), LROverride(NOT_YET, factor=0.5), steps=2, save=checkpoint)
    for policy in ("override", "checkpoint"):
        override = LROverride(peak=0.05, on_conflict=policy)  # type: ignore[arg-type]
        _, rates = fit(Scheduled(lr=0.02), override, steps=4, resume=checkpoint)
        assert rates.used[1] == pytest.approx([0.05, 0.01])


def test_a_cycle_that_has_ended_stays_at_its_last_rate_and_is_saved_and_resumed(tmp_path: Path) -> None:
    def module() -> Scheduled:
        return Scheduled(lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=5))

    with pytest.raises(ValueError, match="Tried to step 6 times"):
        fit(module(), steps=9)
    checkpoint, used = tmp_path / "a.ckpt", []
    for stop in (3, 7, 9):
        resume = checkpoint if used else None
        trainer, rates = fit(module(), LROverride(NOT_YET, factor=0.5), steps=stop, resume=resume, save=checkpoint)
        used += [lrs[0] for lrs in rates.used]
    assert used[4:] == [used[4]] * 5
    assert used[4] == pytest.approx(0.1 / 25 / 1e4)
    assert type(trainer.lr_scheduler_configs[0].scheduler) is schedulers.OneCycleLR
    assert torch.load(checkpoint, weights_only=True)["lr_schedulers"][0]["last_epoch"] == 9


def test_a_cycle_made_shorter_than_the_run_so_far_has_ended(tmp_path: Path) -> None:
    def module(total: int) -> Scheduled:
        return Scheduled(lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=total))

    fit(module(12), LROverride(NOT_YET, factor=0.5), steps=6, save=tmp_path / "a.ckpt")
    override = LROverride(NOT_YET, factor=0.5, on_conflict="override")
    _, rates = fit(module(4), override, steps=8, resume=tmp_path / "a.ckpt")
    assert [lrs[0] for lrs in rates.used] == pytest.approx([0.1 / 25 / 1e4] * 2)


def test_a_scheduler_that_watches_a_metric_keeps_what_it_saw(tmp_path: Path) -> None:
    class Plateau(TinyModule):
        patience = 0

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.log("constant", 1.0)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer(self.parameters())
            scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=self.patience)
            return [optimizer], [{"scheduler": scheduler, "monitor": "constant", "interval": "step"}]

    class Patient(Plateau):
        patience = 3

    checkpoint = tmp_path / "a.ckpt"
    fit(Plateau(), LROverride(NOT_YET, factor=0.5), steps=3, save=checkpoint)
    with pytest.raises(MisconfigurationException, match="ReduceLROnPlateau patience 0 in the checkpoint but 3 now"):
        fit(Patient(), LROverride(NOT_YET, factor=0.5), steps=4, resume=checkpoint)
    override = LROverride(NOT_YET, factor=0.5, on_conflict="override")
    _, rates = fit(Patient(), override, steps=6, resume=checkpoint)
    assert [lrs[0] for lrs in rates.used] == [0.0125] * 3


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


def test_an_option_that_no_group_has_is_refused() -> None:
    sgd = TinyModule(lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(MisconfigurationException, match=r"`LROverride\(betas=.*no parameter group has a betas"):
        fit(sgd, LROverride(betas=(0.9, 0.95)), steps=1)
    with pytest.raises(MisconfigurationException, match=r"`LROverride\(weight_decay=0.1\)`: no parameter group"):
        fit(TinyModule(adamw(weight_decay=0.0)), LROverride(weight_decay=0.1), steps=1)


def test_dropout_in_a_model_that_has_none_is_refused() -> None:
    module = TinyModule()
    module.net[2] = torch.nn.Identity()
    with pytest.raises(MisconfigurationException, match="TinyModule holds no dropout module; build it"):
        fit(module, LROverride(dropout=0.1), steps=1)


def test_rates_that_are_all_zero_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"own rates are \[0.0\].*make the optimizer with"):
        fit(TinyModule(adamw(lr=0.0)), LROverride(peak=0.1), steps=1)
