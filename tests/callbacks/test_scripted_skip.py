"""Steps that are skipped because a list says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import AccumulationWindows, GradClip, GradSpikeSkip, Progress, ScriptedSkip
from lit_stable.callbacks.z_clip import ZClip


def fit(*callbacks: Any, steps: int = 7, fused: bool = True, ckpt: Any = None, module: Any = None) -> tuple[Any, Any]:
    """The trainer, and weights and optimizer after each step."""
    states: dict[int, Any] = {}
    note = Watch("on_train_batch_end", lambda trainer, *rest: states.update({trainer.global_step: snapshot(trainer)}))
    trainer = quiet_trainer(*callbacks, AccumulationWindows(4, 2), note, max_steps=steps)
    trainer.fit(module or TinyModule(adamw(fused=fused, lr=1e-2)), TinyData(), ckpt_path=ckpt)
    return trainer, states


def test_the_steps_of_the_list_are_those_within_its_ranges():
    skip = ScriptedSkip(["13251-14000", "14001-14002", 7])
    assert [step for step in (6, 7, 8, 13_250, 13_251, 14_002, 14_003) if skip.skips(step)] == [7, 13_251, 14_002]
    assert not any(ScriptedSkip([7], action="log").skips(step) for step in (6, 7))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
def test_a_skipped_step_changes_nothing_and_consumes_its_batch(fused: bool) -> None:
    trainer, states = fit(ScriptedSkip(["3-4", 6]), fused=fused)
    assert_same_bits([states[3], states[4], states[6]], [states[2], states[2], states[5]])
    assert not torch.equal(states[5]["weights"]["net.0.weight"], states[4]["weights"]["net.0.weight"])
    progress = Progress.of(trainer)
    assert (progress.steps, progress.skipped, progress.applied, progress.samples) == (7, 3, 4, 28)
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {4}
    assert not hasattr(trainer.optimizers[0], "found_inf")


def test_a_resume_within_the_list_goes_on_skipping(tmp_path) -> None:
    whole = fit(ScriptedSkip(["3-5"], schedule_on_skip="hold"))
    fit(ScriptedSkip(["3-5"], schedule_on_skip="hold"), SaveAtSteps(tmp_path), steps=5)
    for batches in (7, 8, 9):  # within step 4, after it, within step 5
        resumed = fit(ScriptedSkip(["3-5"], schedule_on_skip="hold"), ckpt=tmp_path / f"micro-{batches}.ckpt")
        assert_same_bits(resumed[1][7], whole[1][7])
        assert Progress.of(resumed[0]).state_dict() == Progress.of(whole[0]).state_dict()


class Scheduled(TinyModule):
    """With a scheduler that Lightning steps; the rate of step k is 1 / k of those it was stepped for."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize(("choice", "stepped", "scheduled"), [("hold", 5, (4, 16)), ("advance", 7, (6, 24))])
def test_the_schedule_holds_or_advances(choice: Any, stepped: int, scheduled: tuple[int, int]) -> None:
    trainer, _ = fit(ScriptedSkip(["3-4"], choice), module=Scheduled(adamw(lr=1e-2)))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == stepped
    assert Progress.of(trainer).scheduled[:2] == scheduled  # where the last step began


def test_adaptive_clipping_does_not_learn_from_a_skipped_step() -> None:
    def norms_counted(*callbacks: Any) -> float:
        clip = GradClip(adaptive=ZClip(warmup_steps=20))
        fit(clip, *callbacks)
        return clip.state_dict()["z_clip"]["all"][0]

    assert (norms_counted(), norms_counted(ScriptedSkip(["3-4"]))) == (7, 5)


@pytest.mark.parametrize(("steps", "is_past"), [(["5-6"], True), ([6], True), (["5-7"], False), ([2, 7], False)])
def test_it_says_when_there_is_nothing_left_to_skip(
    steps: Any, is_past: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Watch("on_train_end", lambda trainer: trainer.save_checkpoint(tmp_path / "six.ckpt"))
    fit(ScriptedSkip(steps), save, steps=6)
    said: list[str] = []
    monkeypatch.setattr("lit_stable.callbacks.scripted_skip.rank_zero_info", said.append)
    fit(ScriptedSkip(steps), ckpt=tmp_path / "six.ckpt")
    assert [line.endswith("; all of them are past") for line in said] == [is_past]


def test_to_log_alone_changes_nothing() -> None:
    _, watched = fit(ScriptedSkip(["3-4"], "hold", action="log"))
    _, without = fit()
    assert_same_bits(watched, without)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ({"steps": []}, ["`ScriptedSkip(steps=[])`: skips nothing; name at least one step."]),
        (
            {"steps": ["5-3", 4, "x"]},
            [
                "`ScriptedSkip(steps='5-3')`: must be a step or FIRST-LAST with 1 <= FIRST <= LAST, as 13251-14000.",
                "`ScriptedSkip(steps='x')`: must be a step or FIRST-LAST with 1 <= FIRST <= LAST, as 13251-14000.",
            ],
        ),
    ],
)
def test_wrong_arguments_are_named_together(arguments: Any, lines: list[str]) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        ScriptedSkip(**arguments)
    assert str(caught.value).splitlines() == lines


def test_two_that_hold_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="GradSpikeSkip` holds the schedule too"):
        fit(ScriptedSkip([3], "hold"), GradSpikeSkip(schedule_on_skip="hold"))
    fit(ScriptedSkip([3], "hold"), GradSpikeSkip(), steps=4)


def test_manual_optimization_and_rare_schedulers_are_refused() -> None:
    module = TinyModule(adamw())
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="acts before Lightning's own optimizer step"):
        fit(ScriptedSkip([3]), module=module)

    class Rare(Scheduled):
        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            found["lr_scheduler"]["frequency"] = 2
            return found

    with pytest.raises(MisconfigurationException, match="`ScriptedSkip` takes single optimizer steps off the schedule"):
        fit(ScriptedSkip([3], "hold"), module=Rare(adamw()))
