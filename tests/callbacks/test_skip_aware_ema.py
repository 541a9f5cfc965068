from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.plugins import MixedPrecision
from passes_over import PassesOverStep3
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer

from lit_stable.callbacks import AccumulationWindows, GradClip, GradSpikeSkip, Progress, ScriptedSkip

if not hasattr(lightning_callbacks, "WeightAveraging"):
    pytest.skip("Lightning has WeightAveraging from 2.6 on", allow_module_level=True)

from lit_stable.callbacks.skip_aware_ema import HoldOnSkip, SkipAwareEMA

pytestmark = pytest.mark.filterwarnings("ignore:GradSpikeSkip")


def average(callback: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in callback._average_model.state_dict().items()}


def fit(callback: Any, *others: Any, poison: dict[int, float] | None = None, ckpt: Any = None) -> dict[int, Any]:
    """The average after each step, its count of updates included."""
    seen: dict[int, Any] = {}
    note = Watch("on_train_batch_end", lambda t, *rest: seen.update({t.global_step: average(callback)}))
    own = [GradSpikeSkip(), AccumulationWindows(4, 2), callback, note]
    trainer = quiet_trainer(*own, *others, max_steps=6)
    trainer.fit(TinyModule(adamw(), poison=poison), TinyData(), ckpt_path=ckpt)
    return seen


def test_the_average_stands_still_on_a_scripted_skip_too() -> None:
    seen: dict[int, Any] = {}
    ema = SkipAwareEMA(0.5)
    note = Watch("on_train_batch_end", lambda t, *rest: seen.update({t.global_step: average(ema)}))
    own = [ScriptedSkip([3]), AccumulationWindows(4, 2), ema, note]
    quiet_trainer(*own, max_steps=4).fit(TinyModule(adamw()), TinyData())
    assert_same_bits(seen[3], seen[2])
    assert not torch.equal(seen[4]["module.net.0.weight"], seen[3]["module.net.0.weight"])


class Overflows(TinyModule):
    """The gradient of its third step is not finite; under a scaler it computes in fp32."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        with torch.autocast("cpu", enabled=False):
            return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 2:
            next(self.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]


class Withholds(TinyModule):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


def scaler() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))]}


SKIPS: dict[str, Any] = {
    "clip": lambda make: (Overflows(make), [GradClip()], {}),
    "recovery": lambda make: (TinyModule(make), [PassesOverStep3()], {}),
    "scaler": lambda make: (Overflows(make), [], scaler()),
    "scaler and clip": lambda make: (Overflows(make), [GradClip()], scaler()),
    "withheld": lambda make: (Withholds(make), [], {}),
    "nothing": lambda make: (TinyModule(make), [], scaler()),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
@pytest.mark.parametrize("first", [True, False], ids=["listed first", "listed last"])
@pytest.mark.parametrize("kind", SKIPS)
def test_the_average_stands_still_whoever_skips_the_step(kind: str, first: bool, fused: bool) -> None:
    seen: dict[int, Any] = {}
    ema = SkipAwareEMA(0.5)
    module, others, options = SKIPS[kind](adamw(fused=fused, lr=1e-3))
    note = Watch("on_train_batch_end", lambda t, *rest: seen.update({t.global_step: int(average(ema)["n_averaged"])}))
    trainer = quiet_trainer(*([ema, *others] if first else [*others, ema]), note, max_steps=5, **options)
    trainer.fit(module, TinyData())
    skips = kind != "nothing"
    assert seen == dict(enumerate([1, 2, 2, 3, 4] if skips else [1, 2, 3, 4, 5], 1))
    assert Progress.of(trainer).skipped == skips


def test_the_average_stands_still_on_a_skipped_step_and_lightnings_own_does_not() -> None:
    poison = {2: math.nan, 3: math.nan}
    ours = fit(SkipAwareEMA(0.5), poison=poison)
    assert_same_bits([ours[3], ours[4]], [ours[2], ours[2]])
    assert not torch.equal(ours[5]["module.net.0.weight"], ours[4]["module.net.0.weight"])
    theirs = fit(lightning_callbacks.EMAWeightAveraging(decay=0.5), poison=poison)
    assert not torch.equal(theirs[3]["module.net.0.weight"], theirs[2]["module.net.0.weight"])


def test_without_a_skip_it_is_lightnings_average() -> None:
    assert_same_bits(fit(SkipAwareEMA(0.5)), fit(lightning_callbacks.EMAWeightAveraging(decay=0.5)))


def test_an_average_of_the_users_own_holds_by_the_mixin() -> None:
    class Mine(HoldOnSkip, lightning_callbacks.WeightAveraging):
        pass

    seen = fit(Mine(), poison={2: math.nan})
    assert [int(seen[s]["n_averaged"]) for s in range(1, 7)] == [1, 2, 2, 3, 4, 5]


def test_a_resume_in_the_window_after_a_skip_does_not_make_up_for_it(tmp_path: Path) -> None:
    poison = {2: math.nan}
    straight = fit(SkipAwareEMA(0.5), SaveAtSteps(tmp_path), poison=poison)
    resumed = fit(SkipAwareEMA(0.5), poison=poison, ckpt=tmp_path / "micro-7.ckpt")  # step 3 was skipped
    assert_same_bits([resumed[4], resumed[6]], [straight[4], straight[6]])


def test_a_resume_from_a_save_that_came_before_the_average_holds_too(tmp_path: Path) -> None:
    def run(*others: Any, ckpt: Any = None) -> Any:
        ema = SkipAwareEMA(0.5)
        trainer = quiet_trainer(GradClip(), AccumulationWindows(4, 2), *others, ema, max_steps=4)
        trainer.fit(TinyModule(adamw(), poison={2: math.nan}), TinyData(), ckpt_path=ckpt)
        return average(ema)

    straight = run(SaveAtSteps(tmp_path))
    assert_same_bits(run(ckpt=tmp_path / "micro-6.ckpt"), straight)  # step 3 was skipped


def test_a_resume_in_mid_window_averages_each_step_once(tmp_path: Path) -> None:
    straight = fit(SkipAwareEMA(0.5), SaveAtSteps(tmp_path))
    assert_same_bits(fit(SkipAwareEMA(0.5), ckpt=tmp_path / "micro-5.ckpt")[6], straight[6])


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`SkipAwareEMA\(decay={decay}\)`: must lie in \[0, 1\)"):
        SkipAwareEMA(decay)


def test_a_device_that_is_none_and_a_decay_that_is_no_number_are_refused_in_a_sentence() -> None:
    with pytest.raises(MisconfigurationException, match=r"`SkipAwareEMA\(device='zz'\)`: must be a device of torch"):
        SkipAwareEMA(device="zz")
    with pytest.raises(MisconfigurationException, match=r"`SkipAwareEMA\(decay='1'\)`: must be a number."):
        SkipAwareEMA(decay="1")


def test_with_nobody_who_skips_it_is_lightnings_average() -> None:
    averages = []
    for callback in (SkipAwareEMA(0.5), lightning_callbacks.EMAWeightAveraging(decay=0.5)):
        quiet_trainer(callback, max_steps=3).fit(TinyModule(), TinyData())
        averages.append(average(callback))
    assert_same_bits(*averages)
