from __future__ import annotations

import contextlib
import itertools
import os
import re
import warnings
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import files_of_at_most
from lightning.pytorch import Trainer
from recovery_project import (
    BATCH,
    RUNGS,
    Data,
    Module,
    clean_run,
    ids_by_the_ledger,
    ledger_lines,
    make_trainer,
    poison,
)
from tiny_fit import TinyData, TinyModule, Watch, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import (
    Detectors,
    EffectiveLR,
    Events,
    GradClip,
    GradSpikeSkip,
    Progress,
    Recovery,
    SafeCheckpoints,
    ZClip,
    emit,
    fit_with_recovery,
)
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.branch_end import newest_of_branch
from lit_stable.callbacks.events import Event
from lit_stable.callbacks.recovery_book import RecoveryBook
from lit_stable.callbacks.recovery_exit import RecoveryStopped, Rewind
from lit_stable.callbacks.recovery_ledger import FILE

pytestmark = pytest.mark.filterwarnings("ignore:Recovery", "ignore:step ", "ignore:GradSpikeSkip")


def trouble(*steps: int, kind: str = "spike") -> Watch:
    """Says at the end of those steps that something is wrong."""

    def tell(trainer: Trainer, *rest: Any) -> None:
        if Progress.of(trainer).steps in steps:
            emit(trainer, Event(Progress.of(trainer).steps, kind, {}))

    return Watch("on_train_batch_end", tell)


# -- rewinds ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rescued(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Module]:
    folder = tmp_path_factory.mktemp("rescued")
    module = Module(poison(17, 36))
    fit_with_recovery(make_trainer(folder, 45), module, Data())
    return folder, module


def test_a_run_that_would_die_finishes_without_the_data_it_died_of(rescued: tuple[Path, Module]) -> None:
    folder, module = rescued
    rewinds = ledger_lines(folder, "rewind")
    assert [(e.step, e.done["to"], e.done["dropped"]) for e in rewinds] == [(17, 15, [[30, 38]]), (32, 30, [[68, 76]])]
    ids = ids_by_the_ledger(folder / FILE, 1, 45)
    assert [module.ids[step] for step in range(1, 46)] == ids
    assert not module.poison & {i for step in ids for i in step}
    assert all(p.isfinite().all() for p in module.parameters())


def test_its_weights_are_those_of_a_run_that_was_never_given_them(rescued: tuple[Path, Module], tmp_path: Path) -> None:
    folder, module = rescued
    clean = clean_run(tmp_path, ids_by_the_ledger(folder / FILE, 1, 45))
    assert_same_bits(module.state_dict(), clean.state_dict())


def test_the_ledger_says_when_why_what_and_how_it_ended(rescued: tuple[Path, Module]) -> None:
    folder, _ = rescued
    found = ledger_lines(folder)
    assert [e.number for e in found] == list(range(1, len(found) + 1))
    (first, _) = ledger_lines(folder, "rewind")
    assert (first.why, first.evidence["signal"], first.branch) == ("not_finite", "loss", 0)
    assert first.time.endswith("+00:00")
    assert [e.step for e in ledger_lines(folder, "begun")] == [15, 30]
    assert [(e.done["result"], e.done["rewind"]) for e in ledger_lines(folder, "result")] == [
        ("past the window", e.number) for e in ledger_lines(folder, "rewind")
    ]


def test_without_dropping_the_same_data_the_run_fails_again_further_back_and_stops(tmp_path: Path) -> None:
    rungs = [{**rung, **({"drop": False} if rung["do"] == "rewind" else {})} for rung in RUNGS]
    for rung in rungs:
        if rung["do"] == "rewind":
            rung.update(max_times=3)
    trainer = make_trainer(tmp_path, 30, recovery=Recovery(rungs, {"not_finite": "rewind"}))
    with pytest.raises(RecoveryStopped, match=r"step 17: not finite: "):
        fit_with_recovery(trainer, Module(poison(17)), Data())
    assert [e.done["to"] for e in ledger_lines(tmp_path, "rewind")] == [15, 10, 5]


def test_the_same_window_in_trouble_again_leads_further_back(tmp_path: Path) -> None:
    module = Module(poison(17, 20))  # the second lies just behind what the first rewind drops
    fit_with_recovery(make_trainer(tmp_path, 30), module, Data())
    assert [(e.step, e.done["to"]) for e in ledger_lines(tmp_path, "rewind")] == [(17, 15), (16, 10)]
    assert [module.ids[step] for step in range(1, 31)] == ids_by_the_ledger(tmp_path / FILE, 1, 30)


def test_a_named_step_is_gone_to_whatever_its_health(tmp_path: Path) -> None:
    rungs = [{"do": "rewind", "to": 5, "before": 0, "after": 1}, {"do": "stop"}]
    fit_with_recovery(make_trainer(tmp_path, 25, recovery=Recovery(rungs)), Module(poison(17)), Data())
    assert [(e.done["to"], e.done["dropped"]) for e in ledger_lines(tmp_path, "rewind")] == [(5, [[32, 36]])]


def test_what_was_saved_in_trouble_is_not_gone_back_to(tmp_path: Path) -> None:
    module = Module(poison(13, 14, 16, 17), factor=1e4)
    rungs = [{"do": "wait", "steps": 5, "within": 1.0}, {"do": "rewind", "before": 0, "after": 0}, {"do": "stop"}]
    fit_with_recovery(make_trainer(tmp_path, 25, recovery=Recovery(rungs, {"spike": "wait"})), module, Data())
    saved = {e.step: e.done["healthy"] for e in ledger_lines(tmp_path, "checkpoint") if e.branch == 0}
    assert saved[15] is False
    assert [e.done["to"] for e in ledger_lines(tmp_path, "rewind")] == [10]


def test_checkpoints_of_the_branch_that_was_left_are_set_aside_and_refused(tmp_path: Path) -> None:
    rungs = [{"do": "rewind", "to": 5, "before": 0, "after": 1}, {"do": "stop"}]
    fit_with_recovery(make_trainer(tmp_path, 8, recovery=Recovery(rungs)), Module(), Data())  # nothing yet
    folder = tmp_path / "run"
    fit_with_recovery(make_trainer(folder, 12, recovery=Recovery(rungs)), Module(poison(12)), Data())
    aside = folder / "step-10.ckpt.branch-0"
    assert aside.exists()
    assert (folder / "step-10.ckpt").exists(), "the new branch has one of that name"
    with pytest.raises(MisconfigurationException, match=r"step 10: belongs to a branch that the rewind at step 12"):
        fit_with_recovery(make_trainer(folder, 14, recovery=Recovery(rungs)), Module(), Data(), ckpt_path=aside)


def test_checkpoints_of_the_run_that_a_branch_has_left_stay_as_they_are(tmp_path: Path) -> None:
    rungs = [{"do": "rewind", "to": 5, "before": 0, "after": 1}, {"do": "stop"}]
    parent, branch = tmp_path / "parent", tmp_path / "branch"
    fit_with_recovery(make_trainer(parent, 20, recovery=Recovery(rungs)), Module(), Data())
    names = sorted(path.name for path in parent.glob("*.ckpt*"))
    trainer = make_trainer(branch, 22, recovery=Recovery(rungs))
    fit_with_recovery(trainer, Module(poison(21)), Data(), ckpt_path=parent / "step-20.ckpt")
    assert [entry.done["to"] for entry in ledger_lines(branch, "rewind")] == [5]
    assert sorted(path.name for path in parent.glob("*.ckpt*")) == names


def test_what_a_rewind_changes_stays_in_force(tmp_path: Path) -> None:
    options = {"factor": 0.5, "weight_decay": 0.3, "dropout": 0.4, "clip": 0.01, "reset_optimizer": True}
    rungs = [{"do": "rewind", "before": 0, "after": 0, **options}, {"do": "stop"}]
    seen: dict[int, list[float]] = {}

    def look(trainer: Trainer, *rest: Any) -> None:
        used, module = EffectiveLR.of(trainer).used, trainer.lightning_module
        count = trainer.optimizers[0].state[next(module.parameters())]["step"]
        values = [used["lr"][0], used["weight_decay"][0], module.net[2].p, float(count)]
        seen[Progress.of(trainer).steps] = [*values, float(trainer.callback_metrics["stability/clip_level"])]

    def fit(steps: int, module: Module, path: Any = None) -> Module:
        watch, recovery = Watch("on_train_batch_end", look), Recovery(rungs)
        trainer = make_trainer(tmp_path, steps, GradClip(1.0), watch, recovery=recovery)
        fit_with_recovery(trainer, module, Data(), ckpt_path=path)
        assert module.net[2].p == 0.1, "put back"
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01
        return module

    fit(14, Module(poison(12)))
    assert seen[10] == pytest.approx([0.01, 0.1, 0.1, 10, 1.0])
    assert seen[11] == pytest.approx([0.005, 0.3, 0.4, 1, 0.01])
    assert seen[14] == pytest.approx([0.005, 0.3, 0.4, 4, 0.01])
    seen.clear()
    fit(16, Module(), tmp_path / "step-10.ckpt")  # older than what was changed
    assert seen[11] == pytest.approx([0.005, 0.3, 0.4, 1, 0.01])
    fit(17, Module(), tmp_path / "step-15.ckpt")  # newer: the reset is behind it
    assert seen[16] == pytest.approx([0.005, 0.3, 0.4, 6, 0.01])


def test_what_is_still_to_be_read_may_come_in_another_order(tmp_path: Path) -> None:
    rungs = [{"do": "rewind", "before": 0, "after": 1, "reshuffle": True}, {"do": "stop"}]
    straight, module = Module(), Module(poison(12))
    fit_with_recovery(make_trainer(tmp_path / "a", 40, recovery=Recovery(rungs)), straight, Data())
    fit_with_recovery(make_trainer(tmp_path / "b", 40, recovery=Recovery(rungs)), module, Data())
    before, after = ([i for step in steps for i in module.ids[step]] for steps in (range(1, 12), range(12, 41)))
    assert before == [i for step in range(1, 12) for i in straight.ids[step]]
    order = [i for step in range(12, 41) for i in straight.ids[step] if i in after]
    assert order != [i for i in after if i in order]
    assert not set(before) & set(after)
    assert not module.poison & {*before, *after}
    assert len(set(after)) == len(after)


def test_the_other_order_is_the_same_however_often_the_run_was_saved(tmp_path: Path) -> None:
    rungs = [{"do": "rewind", "to": 10, "before": 0, "after": 1, "reshuffle": True}, {"do": "stop"}]
    orders = []
    for every in (5, 2):
        folder = tmp_path / str(every)
        fit_with_recovery(make_trainer(folder, 14, every=every, recovery=Recovery(rungs)), Module(poison(12)), Data())
        orders += [entry.done["reshuffled"] for entry in ledger_lines(folder, "rewind")]
    assert len(orders) == 2
    assert orders[0] == orders[1]


def test_an_activation_is_judged_once_where_it_is_measured(tmp_path: Path) -> None:
    """What the trainer still has of an earlier measurement would count again, but for the steps behind a resume."""

    class Measures(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if Progress.of(self.trainer).steps % 4 == 0:
                self.log("stability/activation_rms/net", 1.0 + Progress.of(self.trainer).steps)

    recovery = Recovery([{"do": "stop"}])
    fit_with_recovery(make_trainer(tmp_path, 12, recovery=recovery, log_every_n_steps=1), Measures(), Data())
    assert recovery.state_dict()["activations"] == [1.0, 5.0, 9.0]


# -- the other rungs -------------------------------------------------------------------------------------------------


def test_a_spike_that_passes_costs_nothing(tmp_path: Path) -> None:
    straight, waited = Module(), Module()
    make = [make_trainer(tmp_path / "a", 20), make_trainer(tmp_path / "b", 20, trouble(10))]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for trainer, module in zip(make, (straight, waited), strict=True):
            fit_with_recovery(trainer, module, Data())
    assert_same_bits(straight.state_dict(), waited.state_dict())
    told = [text for text in (str(warning.message) for warning in said) if text.startswith("Recovery: step")]
    assert [text.split(";")[0].split(" level")[0] for text in told] == [
        "Recovery: step 10: spike",
        "Recovery: step 15: recovered on rung 1: the loss is back at its",
    ], "of checkpoints and the start the ledger alone speaks"
    assert [(e.action, e.step) for e in ledger_lines(tmp_path / "b", "wait", "result")] == [
        ("wait", 10),
        ("result", 15),
    ]
    assert "median of 5 losses <= " in ledger_lines(tmp_path / "b", "wait")[0].done["criterion"]


def test_skipped_steps_change_nothing_and_their_data_pass_by(tmp_path: Path) -> None:
    weights: dict[int, Any] = {}
    watch = Watch("on_train_batch_end", lambda trainer, *_: weights.update({trainer.global_step: snapshot(trainer)}))
    rungs = [{"do": "skip", "skip_steps": 3, "steps": 8}, {"do": "stop"}]
    trainer = make_trainer(tmp_path, 14, trouble(10), watch, recovery=Recovery(rungs, {"spike": "skip"}))
    fit_with_recovery(trainer, Module(), Data())
    for step in (11, 12, 13):
        assert_same_bits(weights[step], weights[10])
    with pytest.raises(AssertionError):
        assert_same_bits(weights[14], weights[13])
    assert (Progress.of(trainer).skipped, Progress.of(trainer).samples) == (3, 14 * BATCH)


def test_norms_of_skipped_steps_enter_no_statistics(tmp_path: Path) -> None:
    learned: dict[int, Any] = {}
    clip = GradClip(adaptive=ZClip(warmup_steps=4))
    watch = Watch("on_train_batch_end", lambda t, *_: learned.update({t.global_step: clip.state_dict()["z_clip"]}))
    rungs = [{"do": "skip", "skip_steps": 3, "steps": 8}, {"do": "stop"}]
    trainer = make_trainer(tmp_path, 14, trouble(10), watch, clip, recovery=Recovery(rungs, {"spike": "skip"}))
    fit_with_recovery(trainer, Module(), Data())
    assert learned[9] != learned[10] == learned[11] == learned[12] == learned[13] != learned[14]
    assert clip.passes_over is None


def test_the_learning_rate_is_cut_to_a_floor_and_stays(tmp_path: Path) -> None:
    rates: dict[int, float] = {}
    watch = Watch("on_train_batch_end", lambda t, *_: rates.update({t.global_step: EffectiveLR.of(t).used["lr"][0]}))
    rungs = [{"do": "lr", "factor": 0.5, "cooldown": 0, "floor": 0.4, "steps": 5}, {"do": "stop"}]
    make = {"recovery": Recovery(rungs, {"spike": "lr"})}
    with pytest.raises(RecoveryStopped):
        fit_with_recovery(make_trainer(tmp_path, 40, trouble(10, 20, 30), watch, **make), Module(), Data())
    assert [rates[step] for step in (10, 11, 20, 21, 30)] == pytest.approx([0.01, 0.005, 0.005, 0.004, 0.004])
    assert [e.done["factor"] for e in ledger_lines(tmp_path, "lr")] == pytest.approx([0.5, 0.8])
    assert ledger_lines(tmp_path, "stop")[0].step == 30, "at the floor there is nothing more to cut"


def test_a_cut_survives_a_resume(tmp_path: Path) -> None:
    rungs = [{"do": "lr", "factor": 0.5, "steps": 5}, {"do": "stop"}]

    def fit(steps: int, path: Any = None) -> Module:
        module, recovery = Module(), Recovery(rungs, {"spike": "lr"})
        trainer = make_trainer(tmp_path, steps, trouble(7), recovery=recovery)
        fit_with_recovery(trainer, module, Data(), ckpt_path=path)
        return module

    straight = fit(20).state_dict()
    assert_same_bits(fit(20, tmp_path / "step-10.ckpt").state_dict(), straight)
    assert_same_bits(fit(20, tmp_path / "step-5.ckpt").state_dict(), straight)
    assert len(ledger_lines(tmp_path, "lr")) == 1, "the step that was taken twice is written once"


def test_too_many_skips_begin_on_the_ladder_instead_of_ending_the_run(tmp_path: Path) -> None:
    skip = GradSpikeSkip(max_skips=2, at_cap="stop", warmup_steps=4)
    rungs = [{"do": "rewind", "before": 2, "after": 1}, {"do": "stop"}]
    recovery = Recovery(rungs, {"too_many_skips": "rewind"})
    module = Module(poison(12, 13, 14))
    fit_with_recovery(make_trainer(tmp_path, 20, skip, recovery=recovery), module, Data())
    assert [(e.why, e.step, e.done["to"]) for e in ledger_lines(tmp_path, "rewind")] == [("too_many_skips", 14, 10)]


# -- the end ---------------------------------------------------------------------------------------------------------


def test_the_callback_alone_goes_as_far_as_stop(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 30)
    with pytest.raises(RecoveryStopped, match=r"a rewind was passed over: this fit was not begun by fit_with_recovery"):
        trainer.fit(Module(poison(17)), datamodule=Data())
    assert ledger_lines(tmp_path, "rewind") == []


def test_a_stopped_run_is_not_gone_on_with_unasked(tmp_path: Path) -> None:
    rungs = [{"do": "lr", "factor": 0.5, "steps": 5, "max_times": 1, "cooldown": 0}, {"do": "stop"}]

    def fit(steps: int, **options: Any) -> None:
        recovery = Recovery(rungs, {"spike": "lr"}, **options)
        trainer = make_trainer(tmp_path, steps, trouble(7, 16, 26), recovery=recovery)
        fit_with_recovery(trainer, Module(), Data(), ckpt_path="auto")

    with pytest.raises(RecoveryStopped, match="step 16: spike; the ladder has come to its end"):
        fit(30)
    with pytest.raises(RecoveryStopped, match=r"the ladder has ended this run .*after_stop='go_on'"):
        fit(30)
    with pytest.raises(RecoveryStopped, match="step 26: spike; the ladder has come to its end"):
        fit(30, after_stop="go_on")  # with new budgets: it cuts at step 16 now
    assert [e.step for e in ledger_lines(tmp_path, "lr")] == [7, 16]


def test_without_a_healthy_checkpoint_there_is_no_rewind(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 30, every=1000)
    (tmp_path / "step-0.ckpt").unlink(missing_ok=True)
    remove = Watch("on_train_batch_end", lambda *_: (tmp_path / "step-0.ckpt").unlink(missing_ok=True))
    trainer.callbacks.append(remove)
    with pytest.raises(RecoveryStopped, match=r"there is no healthy checkpoint from before step 17"):
        fit_with_recovery(trainer, Module(poison(17)), Data())


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    def damage(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 16:
            (tmp_path / "step-15.ckpt").write_bytes(b"")

    trainer = make_trainer(tmp_path, 20, Watch("on_train_batch_end", damage))
    fit_with_recovery(trainer, Module(poison(17)), Data())
    assert [e.done["to"] for e in ledger_lines(tmp_path, "rewind")] == [10]


def test_a_rewind_that_cannot_be_written_down_is_not_made(tmp_path: Path) -> None:
    def fit() -> Module:
        module = Module(poison(17))
        fit_with_recovery(make_trainer(tmp_path, 30), module, Data(), ckpt_path="auto")
        return module

    full: list[Any] = []

    def fill(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 16 and not full:
            full.append(files_of_at_most((tmp_path / FILE).stat().st_size))
            full[0].__enter__()

    try:
        trainer = make_trainer(tmp_path, 30, Watch("on_before_optimizer_step", fill))
        with pytest.raises(RecoveryStopped, match=r"recovery\.jsonl cannot be written"):
            fit_with_recovery(trainer, Module(poison(17)), Data())
    finally:
        full[0].__exit__(None, None, None)
    assert ledger_lines(tmp_path, "rewind", "stop") == []
    module = fit()  # with room again it goes on from the newest checkpoint, comes by the same data, and steps back
    assert [module.ids[step] for step in range(16, 31)] == ids_by_the_ledger(tmp_path / FILE, 1, 30)[15:]
    assert len(ledger_lines(tmp_path, "rewind")) == 1


def test_only_logging_writes_the_decisions_and_changes_no_bit(tmp_path: Path) -> None:
    plain, logged = Module(poison(17), factor=1e3), Module(poison(17), factor=1e3)
    quiet_trainer(*make_trainer(tmp_path, 1).callbacks[:2], max_steps=40, log_every_n_steps=1).fit(plain, Data())
    rungs = [
        {"do": "wait", "steps": 5},
        {"do": "lr", "factor": 0.5, "steps": 5},
        {"do": "rewind", "steps": 5},
        {"do": "stop"},
    ]
    recovery = Recovery(rungs, {"spike": "wait"}, action="log")
    make_trainer(tmp_path, 40, trouble(*range(20, 40, 3)), recovery=recovery).fit(logged, Data())
    assert_same_bits(plain.state_dict(), logged.state_dict())
    found = ledger_lines(tmp_path, "wait", "lr", "rewind", "stop")
    assert [e.action for e in found] == ["wait", "lr", "rewind", "stop"], "trouble that is not over is told once"
    assert not any(e.done["acted"] for e in found)


def fits_of_at_most(count: int) -> Watch:
    """Ends a test whose run steps back without end."""
    left = itertools.count(count, -1)
    return Watch("on_train_start", lambda *_: None if next(left) else pytest.fail("it steps back for ever"))


ONE_REWIND: list[dict[str, Any]] = [{"do": "rewind", "before": 1, "after": 1, "max_times": 1}, {"do": "stop"}]


@pytest.mark.parametrize("resumed", [15, 20], ids=["before_the_trouble", "within_it"])
def test_what_was_only_logged_is_done_by_a_resume_that_acts(tmp_path: Path, resumed: int) -> None:
    poisoned = poison(17)
    dry = Recovery(ONE_REWIND, {"not_finite": "rewind"}, action="log")
    make_trainer(tmp_path, 25, recovery=dry).fit(Module(poisoned), Data())
    assert [(e.step, e.done["acted"]) for e in ledger_lines(tmp_path, "rewind", "stop")] == [(17, False)]
    module, recovery = Module(poisoned), Recovery(ONE_REWIND, {"not_finite": "rewind"})
    trainer = make_trainer(tmp_path, 30, fits_of_at_most(2), recovery=recovery)
    fit_with_recovery(trainer, module, Data(), ckpt_path=tmp_path / f"step-{resumed}.ckpt")
    done = [(e.step, e.done["to"]) for e in ledger_lines(tmp_path, "rewind", "stop") if e.done["acted"]]
    assert done == [(17 if resumed == 15 else 21, 15)]
    ids = ids_by_the_ledger(tmp_path / FILE, 1, 30)
    assert [module.ids[step] for step in range(16, 31)] == ids[15:]
    assert_same_bits(module.state_dict(), clean_run(tmp_path / "clean", ids).state_dict())


def test_a_ladder_that_was_only_logged_to_its_end_ends_a_run_that_acts(tmp_path: Path) -> None:
    def recovery(**options: Any) -> Recovery:
        return Recovery([{"do": "wait", "steps": 5}, {"do": "stop"}], {"not_finite": "stop"}, **options)

    make_trainer(tmp_path, 25, recovery=recovery(action="log")).fit(Module(poison(17)), Data())
    assert [(e.step, e.done["acted"]) for e in ledger_lines(tmp_path, "stop")] == [(17, False)]
    for path in ("step-15.ckpt", "step-20.ckpt"):
        trainer = make_trainer(tmp_path, 30, recovery=recovery(after_stop="go_on"))
        with pytest.raises(RecoveryStopped, match=f"step {17 if '15' in path else 21}: not finite: "):
            fit_with_recovery(trainer, Module(poison(17)), Data(), ckpt_path=tmp_path / path)


def test_a_cut_that_was_only_logged_counts_neither_for_floor_nor_cooldown_nor_budget(tmp_path: Path) -> None:
    rungs = [{"do": "lr", "factor": 0.5, "floor": 0.3, "cooldown": 8, "max_times": 2, "steps": 5}, {"do": "stop"}]
    rates: dict[int, float] = {}
    watch = Watch("on_train_batch_end", lambda t, *_: rates.update({t.global_step: EffectiveLR.of(t).used["lr"][0]}))
    for action, steps, path in (("log", 30, None), ("act", 40, tmp_path / "step-30.ckpt")):
        recovery = Recovery(rungs, {"spike": "lr"}, action=action)  # type: ignore[arg-type]
        watched = [watch] if action == "act" else []
        trainer = make_trainer(tmp_path, steps, trouble(10, 20, 29, 36), *watched, recovery=recovery)
        with contextlib.suppress(RecoveryStopped):
            fit_with_recovery(trainer, Module(), Data(), ckpt_path=path)
    lines = [(e.step, e.action, e.done["acted"], e.done.get("factor")) for e in ledger_lines(tmp_path, "lr", "stop")]
    assert lines[:3] == [(10, "lr", False, 0.5), (20, "lr", False, 0.6), (29, "stop", False, None)]
    assert lines[3] == (31, "lr", True, 0.5), "the trouble that the dry run has left is answered at once"
    assert (rates[31], rates[32]) == pytest.approx((0.01, 0.005))


def test_a_rewind_whose_line_is_not_in_effect_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next fit would drop nothing, come by the same data, and step back for ever."""
    add = RecoveryBook.add

    def all_but_rewinds(book: RecoveryBook, trainer: Trainer, step: int, action: str, **fields: Any) -> bool:
        return action == "rewind" or add(book, trainer, step, action, **fields)

    monkeypatch.setattr(RecoveryBook, "add", all_but_rewinds)
    with pytest.raises(RecoveryStopped, match="its line is not in effect"):
        fit_with_recovery(make_trainer(tmp_path, 30, fits_of_at_most(1)), Module(poison(17)), Data())
    assert (tmp_path / "step-15.ckpt").exists()


def test_a_rewind_that_had_not_begun_begins_under_log_too(tmp_path: Path) -> None:
    """Or a restart would go back to its target again and again."""
    with pytest.raises(Rewind):
        make_trainer(tmp_path, 30, recovery=Recovery(RUNGS, restart=True)).fit(Module(poison(22)), Data())
    trainer = make_trainer(tmp_path, 28, recovery=Recovery(RUNGS, action="log"))
    fit_with_recovery(trainer, Module(poison(22)), Data(), ckpt_path="auto")
    assert newest_of_branch(tmp_path) == tmp_path / "step-25.ckpt"


def test_a_reset_that_a_branch_has_begun_without_is_not_made_up_for_later(tmp_path: Path) -> None:
    """The branch began under `log`, which changes no bit; moments that fill since then are not those it was for."""
    options = {"factor": 0.5, "weight_decay": 0.3, "reset_optimizer": True}
    rungs = [{"do": "rewind", "before": 1, "after": 1, **options}, {"do": "stop"}]
    with pytest.raises(Rewind):
        make_trainer(tmp_path, 20, recovery=Recovery(rungs, restart=True)).fit(Module(poison(17)), Data())
    steps: dict[str, list[tuple[float, float]]] = {}
    for action, last in (("log", 20), ("act", 25)):
        found = steps.setdefault(action, [])

        def note(trainer: Any, *rest: Any, found: list[tuple[float, float]] = found) -> None:
            state = next(iter(trainer.optimizers[0].state.values()))
            effective = next((c for c in trainer.callbacks if isinstance(c, EffectiveLR) and c.used), None)
            found.append((float(state["step"]), effective.used["lr"][0] if effective else 0.01))

        recovery = Recovery(rungs, action=action)  # type: ignore[arg-type]
        trainer = make_trainer(tmp_path, last, Watch("on_train_batch_end", note), recovery=recovery)
        fit_with_recovery(trainer, Module(poison(17)), Data(), ckpt_path="auto")
    assert [count for count, _ in [*steps["log"], *steps["act"]]] == list(range(16, 26))
    assert {rate for _, rate in steps["log"]} == {0.01}
    assert {rate for _, rate in steps["act"]} == {0.005}, "what a rewind has put in force stays so where the run acts"


# -- going on after a kill -------------------------------------------------------------------------------------------


def test_a_rewind_that_had_not_begun_is_gone_on_with(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 30, recovery=Recovery(RUNGS, restart=True))
    with pytest.raises(Rewind, match="step 17: rewinding to step 15"):
        fit_with_recovery(trainer, Module(poison(17)), Data())
    assert newest_of_branch(tmp_path) == tmp_path / "step-15.ckpt"
    module = Module(poison(17))
    trainer = make_trainer(tmp_path, 30, recovery=Recovery(RUNGS, restart=True))
    fit_with_recovery(trainer, module, Data(), ckpt_path="auto")
    ids = ids_by_the_ledger(tmp_path / FILE, 1, 30)
    assert [module.ids[step] for step in range(16, 31)] == ids[15:]
    assert_same_bits(module.state_dict(), clean_run(tmp_path / "clean", ids).state_dict())


def test_killed_between_the_line_and_the_renaming_it_renames(tmp_path: Path) -> None:
    rungs = [{"do": "rewind", "to": 5, "before": 0, "after": 0}, {"do": "stop"}]
    with pytest.raises(Rewind):
        make_trainer(tmp_path, 30, recovery=Recovery(rungs, restart=True)).fit(Module(poison(12)), Data())
    (tmp_path / "step-10.ckpt.branch-0").rename(tmp_path / "step-10.ckpt")
    trainer = make_trainer(tmp_path, 9, recovery=Recovery(rungs))
    fit_with_recovery(trainer, Module(), Data(), ckpt_path="auto")
    assert (tmp_path / "step-10.ckpt.branch-0").exists()
    assert not (tmp_path / "step-10.ckpt").exists()
    assert newest_of_branch(tmp_path) == tmp_path / "step-5.ckpt"


def test_a_run_in_another_folder_takes_its_history_along(tmp_path: Path) -> None:
    fit_with_recovery(make_trainer(tmp_path / "old", 25), Module(poison(17)), Data())
    module = Module()
    trainer = make_trainer(tmp_path / "new", 22, every=1000)
    fit_with_recovery(trainer, module, Data(), ckpt_path=tmp_path / "old" / "step-15.ckpt")
    assert [module.ids[step] for step in range(16, 23)] == ids_by_the_ledger(tmp_path / "old" / FILE, 1, 22)[15:]
    assert Progress.of(trainer).dropped == [(30, 38)]


def test_a_new_run_in_an_old_folder_begins_without_history(tmp_path: Path) -> None:
    fit_with_recovery(make_trainer(tmp_path, 20), Module(poison(17)), Data())
    trainer = make_trainer(tmp_path, 20)
    fit_with_recovery(trainer, Module(), Data())
    assert Progress.of(trainer).dropped == []
    assert len({e.run for e in ledger_lines(tmp_path)}) == 2


class BackwardsClock(datetime):
    """Set back by a day whenever it is read."""

    days = itertools.count(1)

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2030, 1, 1, tzinfo=tz) - timedelta(days=next(cls.days))


def test_a_clock_that_is_set_back_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_stable.callbacks.recovery_ledger.datetime", BackwardsClock)

    def set_back(trainer: Trainer, *rest: Any) -> None:
        for number, path in enumerate(sorted(tmp_path.glob("*.ckpt"), key=lambda p: int(p.stem.partition("-")[2]))):
            os.utime(path, (1e9 - 1e6 * number,) * 2)

    def fit() -> Module:
        module, recovery = Module(poison(17)), Recovery(RUNGS, {"not_finite": "rewind"}, restart=True)
        trainer = make_trainer(tmp_path, 30, Watch("on_train_batch_start", set_back), recovery=recovery)
        fit_with_recovery(trainer, module, Data(), ckpt_path="auto")
        return module

    with pytest.raises(Rewind, match="step 17: rewinding to step 15"):
        fit()
    module, ids = fit(), ids_by_the_ledger(tmp_path / FILE, 1, 30)
    times = [entry.time for entry in ledger_lines(tmp_path)]
    assert times == sorted(times, reverse=True)
    assert_same_bits(module.state_dict(), clean_run(tmp_path / "clean", ids).state_dict())
    assert newest_of_branch(tmp_path) == tmp_path / "step-30.ckpt"


def test_healthy_checkpoints_are_asked_to_be_kept(tmp_path: Path) -> None:
    recovery = Recovery([{"do": "rewind", "to": 5}, {"do": "stop"}], keep=2)
    fit_with_recovery(make_trainer(tmp_path, 30, recovery=recovery), Module(), Data())
    assert {path.name for path in recovery.checkpoints_to_keep()} == {"step-5.ckpt", "step-25.ckpt", "step-30.ckpt"}
    assert Recovery([{"do": "stop"}]).checkpoints_to_keep() == set()


# -- what it needs ---------------------------------------------------------------------------------------------------


def without(kind: type, folder: Path, **options: Any) -> Trainer:
    trainer = make_trainer(folder, 4, **options)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, kind)]
    return trainer


def test_what_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"put `Detectors\(\)` into"):
        without(Detectors, tmp_path).fit(Module(), Data())
    with pytest.raises(MisconfigurationException, match=r"put `SafeCheckpoints\(\)` into"):
        without(SafeCheckpoints, tmp_path).fit(Module(), Data())
    clipping = Recovery([{"do": "rewind", "clip": 0.5}])
    with pytest.raises(MisconfigurationException, match=r"put `GradClip\(\)` into"):
        make_trainer(tmp_path, 4, recovery=clipping).fit(Module(), Data())
    with pytest.raises(MisconfigurationException, match=r"has no `Recovery` among its callbacks"):
        fit_with_recovery(without(Recovery, tmp_path), Module(), Data())
    with pytest.raises(MisconfigurationException, match=r"Recovery\(keep=0\)"):
        Recovery(keep=0)


def test_a_loader_that_would_read_what_is_dropped_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"nothing says that the training loader leaves out"):
        make_trainer(tmp_path, 4).fit(TinyModule(), TinyData())
    kept = Recovery([{"do": "rewind", "drop": False}, {"do": "stop"}])
    make_trainer(tmp_path, 2, recovery=kept).fit(TinyModule(), TinyData())


def test_dropout_without_a_module_for_it_is_refused(tmp_path: Path) -> None:
    module = Module()
    module.net[2] = torch.nn.Identity()
    rungs = [{"do": "rewind", "dropout": 0.2}, {"do": "stop"}]
    with pytest.raises(MisconfigurationException, match=r"`Recovery\(dropout=0.2\)`: Module holds no dropout module"):
        make_trainer(tmp_path, 4, recovery=Recovery(rungs)).fit(module, Data())


def test_it_listens_no_longer_when_the_fit_is_over(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 4)
    fit_with_recovery(trainer, Module(), Data())
    events = Events.of(trainer)
    assert (events.listeners, events.answered, Progress.of(trainer).restored) == ({}, set(), {})


def test_what_it_logs(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 22)
    fit_with_recovery(trainer, Module(poison(17)), Data())
    found = {k: float(v) for k, v in trainer.callback_metrics.items() if re.search("recovery|rewinds", k)}
    assert found == {"stability/recovery_rung": 0.0, "stability/recovery_lr_factor": 1.0, "stability/rewinds": 1.0}
