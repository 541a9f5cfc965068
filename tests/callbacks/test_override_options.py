"""``LROverride`` of weight decay, betas, eps, dropout and the clipping norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scheduled_fit import Scheduled, fit, take_what_is_printed
from tiny_fit import TinyModule, Watch, adamw, assert_same_bits, snapshot

from lit_stable.callbacks import EffectiveLR, GradClip, LROverride, global_grad_norm


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return take_what_is_printed(monkeypatch)


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


def test_a_decay_switched_off_on_resume_stays_off_over_three_resumes(tmp_path: Path) -> None:
    checkpoint, used = tmp_path / "a.ckpt", []
    fit(Scheduled(weight_decay=0.5), steps=2, save=checkpoint)
    note = Watch("on_train_batch_end", lambda t, *rest: used.append(EffectiveLR.of(t).used["weight_decay"]))
    for stop in (3, 5, 6):
        override = LROverride(weight_decay=0.0)
        trainer, _ = fit(Scheduled(weight_decay=0.5), override, note, steps=stop, resume=checkpoint, save=checkpoint)
        assert [g["weight_decay"] for g in trainer.optimizers[0].param_groups] == [0.5, 0.0]
    assert used == [[0.0, 0.0]] * 4


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
