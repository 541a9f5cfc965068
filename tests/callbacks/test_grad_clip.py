from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import AccumulationWindows, GradClip, GradNorm, GradSpikeSkip, Progress, global_grad_norm
from lit_stable.callbacks.z_clip import ZClip

both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
bad_numbers = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)


def sgd(fused: bool) -> Callable[..., torch.optim.Optimizer]:
    """Plain SGD at rate 1: the update is the gradient, as clipped."""
    return lambda parameters: torch.optim.SGD(parameters, lr=1.0, fused=fused)


@both_kernels
def test_the_clipped_update_has_exactly_the_largest_norm_and_the_gradients_direction(fused: bool) -> None:
    gradients: list[torch.Tensor] = []
    note = lambda t, o: gradients.append(torch.cat([p.grad.flatten() for p in t.lightning_module.parameters()]))  # noqa: E731
    module = TinyModule(sgd(fused))
    before = torch.cat([p.detach().flatten().clone() for p in module.parameters()])
    # The watch stands before GradClip: what it sees is not yet clipped.
    quiet_trainer(Watch("on_before_optimizer_step", note), GradClip(0.01), max_steps=1).fit(module, TinyData())
    update = before - torch.cat([p.detach().flatten() for p in module.parameters()])
    assert update.norm().item() == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(update / update.norm(), gradients[0] / gradients[0].norm(), rtol=1e-3, atol=1e-5)


def test_looped_gradients_have_exactly_the_largest_norm_after_clipping() -> None:
    norms: list[float] = []
    note = lambda t, o: norms.append(float(global_grad_norm(t.lightning_module.parameters())))  # noqa: E731
    trainer = quiet_trainer(GradClip(0.25), Watch("on_before_optimizer_step", note), max_steps=3)
    trainer.fit(TinyModule(adamw(fused=False)), TinyData())
    assert norms == pytest.approx([0.25] * 3, rel=1e-6)


@both_kernels
def test_equals_torchs_clip_grad_norm(fused: bool) -> None:
    runs = []
    for callbacks, options in (([GradClip(0.05)], {}), ([], {"gradient_clip_val": 0.05})):
        trainer = quiet_trainer(*callbacks, max_steps=5, **options)
        # Lightning's own clipping is for looped optimizers and for fused ones in full precision alike.
        trainer.fit(TinyModule(adamw(fused=fused)), TinyData(resumes=False))
        runs.append(snapshot(trainer)["weights"])
    # torch adds 1e-6 to the norm before dividing; AdamW's update hardly depends on the scale.
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-5)


@both_kernels
def test_a_step_that_is_not_clipped_is_bit_identical_to_one_without_the_callback(fused: bool) -> None:
    runs = []
    for callbacks in ([], [GradClip(1e6)]):
        trainer = quiet_trainer(*callbacks, max_steps=5)
        trainer.fit(TinyModule(adamw(fused=fused)), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])


@both_kernels
@bad_numbers
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
def test_a_non_finite_gradient_changes_nothing_and_is_counted(fused: bool, bad: float, amsgrad: bool) -> None:
    states: dict[int, Any] = {}

    def note(trainer: Any, *rest: Any) -> None:
        states[trainer.global_step] = snapshot(trainer)

    trainer = quiet_trainer(GradClip(0.1), Watch("on_train_batch_end", note), max_steps=5)
    trainer.fit(TinyModule(adamw(fused=fused, amsgrad=amsgrad), poison={2: bad, 3: bad}), TinyData())
    assert_same_bits(states[4], states[2])  # weights, moments and step counts
    assert Progress.of(trainer).skipped == 2
    assert Progress.of(trainer).applied == 3
    assert {int(s["step"]) for s in trainer.optimizers[0].state.values()} == {3}
    assert not torch.equal(states[5]["weights"]["net.0.weight"], states[4]["weights"]["net.0.weight"])


@both_kernels
def test_the_very_first_step_may_be_the_bad_one(fused: bool) -> None:
    trainer = quiet_trainer(GradClip(0.1), max_steps=1)
    module = TinyModule(adamw(fused=fused), poison={0: math.nan})
    before = {k: v.clone() for k, v in module.state_dict().items()}
    trainer.fit(module, TinyData())
    assert_same_bits(dict(module.state_dict()), before)
    assert Progress.of(trainer).skipped == 1


@both_kernels
def test_one_bad_step_neither_skips_its_followers_nor_stops_the_clipping(fused: bool) -> None:
    callback = GradClip(0.01)
    trainer = quiet_trainer(callback, max_steps=200, log_every_n_steps=0)
    trainer.fit(TinyModule(adamw(fused=fused, lr=1e-3), poison={1: math.nan}), TinyData())
    assert Progress.of(trainer).skipped == 1
    assert callback.state_dict() == {"clipped": 199.0, "seen": 200}
    assert {int(s["step"]) for s in trainer.optimizers[0].state.values()} == {199}


def test_one_bad_micro_batch_spoils_its_whole_window_only() -> None:
    class BadBatch(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            assert loss is not None
            return loss * math.nan if batch_idx == 4 else loss

    trainer = quiet_trainer(GradClip(0.1), AccumulationWindows(6, 2), max_steps=4)
    trainer.fit(BadBatch(), TinyData())
    assert (Progress.of(trainer).steps, Progress.of(trainer).skipped) == (4, 1)


def test_the_count_of_skipped_steps_survives_a_resume_with_no_other_callback_given(tmp_path: Path) -> None:
    first = quiet_trainer(GradClip(0.1), max_steps=3)
    first.fit(TinyModule(poison={1: math.nan}), TinyData(resumes=False))
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(GradClip(0.1), max_steps=5)
    second.fit(TinyModule(poison={3: math.nan}), TinyData(resumes=False), ckpt_path=tmp_path / "a.ckpt")
    assert (Progress.of(second).steps, Progress.of(second).skipped) == (5, 2)


def test_the_schedulers_step_is_not_held_and_the_batch_counts_as_consumed_when_a_step_is_skipped() -> None:
    trainer = quiet_trainer(GradClip(0.1), max_steps=3)
    trainer.fit(TinyModule(poison={1: math.nan}), TinyData())
    assert Progress.of(trainer).samples == 6


def test_found_inf_and_grad_scale_are_there_in_the_step_and_gone_after_it() -> None:
    def present(optimizer: Any) -> list[str]:
        return [name for name in ("found_inf", "grad_scale") if hasattr(optimizer, name)]

    before: list[list[str]] = []
    after: list[list[str]] = []
    watches = [
        Watch("on_before_optimizer_step", lambda t, optimizer: before.append(present(optimizer))),
        Watch("on_train_batch_end", lambda t, *rest: after.append(present(t.optimizers[0]))),
    ]
    trainer = quiet_trainer(GradClip(0.1), *watches, max_steps=3)
    trainer.fit(TinyModule(poison={1: math.nan}), TinyData())
    assert before == [["found_inf", "grad_scale"]] * 3
    assert after == [[]] * 3
    assert present(trainer.optimizers[0]) == []
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


def test_teardown_takes_the_attributes_away_when_the_step_never_came() -> None:
    callback = GradClip(0.1)
    trainer = quiet_trainer(callback, max_steps=1)
    trainer.fit(module := TinyModule(), TinyData())
    GradNorm.of(trainer).value = torch.tensor(1.0)
    callback.on_before_optimizer_step(trainer, module, trainer.optimizers[0])
    assert hasattr(trainer.optimizers[0], "grad_scale")
    callback.teardown(trainer, module, "fit")
    assert not hasattr(trainer.optimizers[0], "grad_scale")
    assert not hasattr(trainer.optimizers[0], "found_inf")


def test_logs_the_fraction_of_clipped_steps_since_the_last_logging_step(tmp_path: Path) -> None:
    class Scaled(TinyModule):
        """Gradients of norm about 1, but a thousand times that in steps 0, 1 and 5."""

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if loss is None else loss * (1000.0 if batch_idx in (0, 1, 5) else 1.0)

    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(GradClip(50.0), logger=logger, log_every_n_steps=4, max_steps=8)
    trainer.fit(Scaled(), TinyData())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    column = header.split(",").index("stability/clip_frac")
    assert [float(row.split(",")[column]) for row in rows] == [0.5, 0.25]


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_largest_norm_that_is_no_finite_positive_number_is_refused(wrong: float) -> None:
    with pytest.raises(
        MisconfigurationException, match=rf"`GradClip\(max_norm={wrong}\)`: must be a finite number > 0"
    ):
        GradClip(wrong)


def test_the_trainers_own_clipping_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"`Trainer\(gradient_clip_val=0.5\)`: .* delete gradient_clip_val"
    ):
        quiet_trainer(GradClip(), gradient_clip_val=0.5).fit(TinyModule(), TinyData())


def test_the_modules_own_clipping_is_refused() -> None:
    class Clips(TinyModule):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            pass

    with pytest.raises(
        MisconfigurationException, match=r"`Clips.configure_gradient_clipping` is overridden: .* delete"
    ):
        quiet_trainer(GradClip()).fit(Clips(), TinyData())


def test_manual_optimization_is_refused() -> None:
    class Manual(TinyModule):
        automatic_optimization = False

    with pytest.raises(MisconfigurationException, match=r"`Manual.automatic_optimization=False`: .* use automatic"):
        quiet_trainer(GradClip()).fit(Manual(), TinyData())


def norms_after(
    callback: GradClip, steps: int, *others: Any, norm_type: Any = "l2", resume: Path | None = None, **module: Any
) -> list[float]:
    """Norm of the looped gradients after clipping, by step."""
    norms: list[float] = []

    def note(trainer: Any, optimizer: Any) -> None:
        norms.append(float(global_grad_norm(trainer.lightning_module.parameters(), norm_type=norm_type)))

    watch = Watch("on_before_optimizer_step", note)
    trainer = quiet_trainer(callback, *others, watch, max_steps=steps, log_every_n_steps=0)
    trainer.fit(TinyModule(adamw(fused=False, lr=1e-3), **module), TinyData(), ckpt_path=resume)
    return norms


def test_the_largest_element_can_be_what_is_clipped() -> None:
    assert norms_after(GradClip(0.01, norm_type="inf"), 2, norm_type="inf") == pytest.approx([0.01] * 2, rel=1e-6)
    assert norms_after(GradClip(0.01, norm_type="inf"), 1)[0] > 0.011  # their l2 norm is larger


@bad_numbers
def test_a_non_finite_gradient_is_seen_under_the_inf_norm_too(bad: float) -> None:
    trainer = quiet_trainer(GradClip(1.0, norm_type="inf"), max_steps=3)
    trainer.fit(TinyModule(poison={1: bad}), TinyData())
    assert Progress.of(trainer).skipped == 1


@pytest.mark.parametrize(("unit", "mark"), [("steps", 2), ("samples", 12), ("samples", 7), ("tokens", 48)])
def test_the_schedule_is_a_function_of_what_was_committed_before_the_step(unit: Any, mark: int) -> None:
    callback = GradClip(0.25, schedule=[{"from": mark, "max_norm": 0.125}], unit=unit)
    # 6 samples of 4 tokens a step
    assert norms_after(callback, 4, AccumulationWindows(6, 2)) == pytest.approx([0.25, 0.25, 0.125, 0.125], rel=1e-6)


def test_a_resume_clips_by_the_norm_and_the_schedule_that_it_is_given(tmp_path: Path) -> None:
    """Lower after a restart, and lower again at a step: no checkpoint holds what was in force when it was saved."""
    clips = (
        GradClip(0.25),
        GradClip(0.15),
        GradClip(0.15, schedule=[{"from": 5, "max_norm": 0.1}]),
    )
    found, resume = [], None
    for stop, clip in zip((2, 4, 7), clips, strict=True):
        found += norms_after(clip, stop, SaveAtSteps(tmp_path), resume=resume)
        resume = tmp_path / "micro-2.ckpt"
    assert found == pytest.approx([0.25, 0.25, 0.15, 0.15, 0.15, 0.1, 0.1], rel=1e-6)


def test_adaptive_clips_a_spike_to_about_the_usual_norm_and_nothing_else() -> None:
    usual = norms_after(GradClip(1e9), 45)
    spiked = norms_after(GradClip(adaptive=ZClip(z_threshold=6.0)), 45, poison={30: 1000.0, 33: math.nan, 36: 500.0})
    for step in (30, 36):
        assert 0.2 * max(usual) < spiked[step] < max(usual)
    assert spiked[:30] == usual[:30]
    assert spiked[33] == 0.0  # dropped, and it blinds nothing


def test_a_low_cap_neither_hides_nor_shapes_the_statistics_of_the_adaptive_mode() -> None:
    free, capped = GradClip(adaptive=ZClip()), GradClip(1e-3, adaptive=ZClip())
    for callback in (free, capped):
        trainer = quiet_trainer(callback, max_steps=30, log_every_n_steps=0)
        trainer.fit(TinyModule(lambda ps: torch.optim.SGD(ps, lr=0.0, fused=True)), TinyData())
    assert capped.state_dict()["z_clip"] == free.state_dict()["z_clip"]
    assert capped.state_dict()["clipped"] == 30.0
    assert free.state_dict()["clipped"] < 5


def adaptive() -> GradClip:
    return GradClip(
        adaptive=ZClip(warmup_steps=3, z_threshold=1.0), schedule=[{"from": 4, "max_norm": 0.5}], max_norm=1.5
    )


def test_adaptive_and_scheduled_clipping_resume_bit_for_bit(tmp_path: Path) -> None:
    def fit(*others: Any, resume: Path | None = None) -> Any:
        trainer = quiet_trainer(callback := adaptive(), *others, max_steps=8)
        trainer.fit(TinyModule(poison={2: math.nan, 6: 100.0}), TinyData(), ckpt_path=resume)
        return snapshot(trainer), callback.state_dict()

    straight = fit(SaveAtSteps(tmp_path))
    for name in ("start", "micro-2", "micro-3", "micro-6"):
        resumed = fit(resume=tmp_path / f"{name}.ckpt")
        assert_same_bits(resumed[0], straight[0], name)
        assert resumed[1] == straight[1], name


def test_steps_that_another_callback_skips_and_norms_of_zero_enter_no_statistics() -> None:
    def learned(*others: Any, fused: bool = True, **module: Any) -> list[float]:
        callback = GradClip(adaptive=ZClip(z_threshold=50.0))
        trainer = quiet_trainer(callback, *others, max_steps=6, log_every_n_steps=0)
        trainer.fit(TinyModule(lambda ps: torch.optim.SGD(ps, lr=0.0, fused=fused), **module), TinyData())
        return callback.state_dict()["z_clip"]["all"]

    for fused in (True, False):
        skip = GradSpikeSkip(threshold=1e3, z_score=None)
        spiked, zero = learned(skip, fused=fused, poison={3: 1e6}), learned(fused=fused, poison={3: 0.0})
        assert len(skip.events) == 1
        assert spiked == zero
        assert spiked[0] == 5.0


def test_adaptive_clipping_starts_from_a_checkpoint_of_a_fixed_one() -> None:
    callback = adaptive()
    callback.load_state_dict({"clipped": 2.0, "seen": 3})
    assert callback.state_dict() == {"clipped": 2.0, "seen": 3, "z_clip": {}}
    fixed = GradClip(1.0)
    fixed.load_state_dict(callback.state_dict())
    assert fixed.state_dict() == {"clipped": 2.0, "seen": 3}


@both_kernels
def test_log_counts_the_same_and_touches_nothing(fused: bool) -> None:
    poison = {2: math.nan, 4: 50.0}
    runs = []
    callbacks = [None, GradClip(0.05, action="log"), GradClip(0.05)]
    for callback in callbacks:
        trainer = quiet_trainer(*([callback] if callback else []), max_steps=2, log_every_n_steps=0)
        trainer.fit(TinyModule(adamw(fused=fused)), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])
    assert callbacks[1].state_dict() == callbacks[2].state_dict() == {"clipped": 2.0, "seen": 2}  # type: ignore[union-attr]
    log = GradClip(0.05, action="log")
    trainer = quiet_trainer(log, max_steps=6, log_every_n_steps=0)
    trainer.fit(module := TinyModule(adamw(fused=fused), poison=poison), TinyData())
    assert Progress.of(trainer).skipped == 0
    assert module.net[0].weight.isnan().all()


def test_the_level_in_force_is_logged(tmp_path: Path) -> None:
    def levels(callback: GradClip) -> list[float]:
        trainer = quiet_trainer(callback, logger=CSVLogger(tmp_path), log_every_n_steps=1, max_steps=4)
        trainer.fit(TinyModule(), TinyData())
        header, *rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().split()
        return [float(row.split(",")[header.split(",").index("stability/clip_level")]) for row in rows]

    assert levels(GradClip(2.5, schedule=[{"from": 2, "max_norm": 1.5}])) == [2.5, 2.5, 1.5, 1.5]
    first, second, third, fourth = levels(GradClip(adaptive=ZClip(warmup_steps=2)))
    assert first == second == math.inf
    assert 0 < third < math.inf
    assert 0 < fourth < math.inf
    assert levels(GradClip(2.5, adaptive=ZClip(warmup_steps=9))) == [2.5] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": [{"from": 5, "max_norm": 1.0}]}, r"schedule begins at 5: give max_norm"),
    ],
)
def test_options_that_are_not_offered_are_refused(options: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        GradClip(**options)


def test_the_default_is_a_largest_norm_of_one() -> None:
    assert GradClip().max_norm == 1.0
    assert GradClip(adaptive=ZClip()).max_norm is None
