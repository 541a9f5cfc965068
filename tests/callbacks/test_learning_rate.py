from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from scheduled_fit import SCHEDULERS, Rates, Scheduled
from tiny_fit import TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot, train_more

from lit_stable.callbacks import AccumulationWindows, EffectiveLR, Progress
from lit_stable.callbacks.base import StabilityCallback


class Modified(StabilityCallback):
    """Installs one modifier for the length of a fit."""

    order = 50

    def __init__(self, function: Any, key: str = "lr") -> None:
        self.function, self.key = function, key

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        EffectiveLR.of(trainer).add_option("Modified", self.key, self.function)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        EffectiveLR.of(trainer).remove("Modified")


def half_from(step: int) -> Any:
    return lambda mark, lr, group: 0.5 * lr if mark.steps >= step else lr


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_is_modified_exactly_and_finds_its_own_rates(name: str) -> None:
    runs = []
    for callbacks in ([EffectiveLR()], [Modified(half_from(3))]):
        rates = Rates()
        quiet_trainer(*callbacks, rates, max_steps=8).fit(Scheduled(SCHEDULERS[name]), TinyData())
        runs.append(rates)
    assert runs[1].used == [[lr * (0.5 if k >= 3 else 1) for lr in lrs] for k, lrs in enumerate(runs[0].used)]
    assert runs[1].outside == runs[0].outside


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
def test_the_weights_move_by_the_effective_rate(fused: bool) -> None:
    runs = []
    for callbacks, lr in (([Modified(lambda mark, lr, group: 0.25 * lr)], 0.04), ([], 0.01)):
        trainer = quiet_trainer(*callbacks, max_steps=3)
        trainer.fit(TinyModule(adamw(fused=fused, lr=lr)), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[0], runs[1])


def test_without_a_modifier_no_bit_moves() -> None:
    runs = []
    for callbacks in ([EffectiveLR()], []):
        trainer = quiet_trainer(*callbacks, max_steps=4)
        trainer.fit(Scheduled(SCHEDULERS["OneCycleLR"]), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[0], runs[1])


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
def test_a_modifier_sees_the_counters_at_the_opening_of_the_window(scaled: bool) -> None:
    """In plain precision the pre-hook runs before the closure that commits the step, under a scaler after it."""
    marks: list[tuple[int, int]] = []

    def note(mark: Any, lr: float, group: int) -> float:
        marks.append((mark.steps, mark.samples))
        return lr

    plugins = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))] if scaled else []
    trainer = quiet_trainer(Modified(note), AccumulationWindows(6, 2), plugins=plugins, max_steps=3)
    trainer.fit(TinyModule(adamw(fused=False)), TinyData())
    assert marks == [(0, 0), (1, 6), (2, 12)]


def test_replacing_modifiers_act_before_factors_and_both_by_name() -> None:
    effective = EffectiveLR()
    effective.add("a_factor", lambda mark, lr, group: lr * 3)
    effective.add("b_new", lambda mark, lr, group: 5.0, replaces=True)
    effective.add("c_factor", lambda mark, lr, group: lr + 1)
    mark = Progress().start
    assert effective.effective("lr", mark, 1.0, 0) == 16.0
    effective.remove("b_new")
    assert effective.effective("lr", mark, 1.0, 0) == 4.0


def test_an_option_is_changed_for_the_step_alone() -> None:
    """Zero gradients: each step multiplies the weights by 1 - lr * weight_decay."""

    class NoGradient(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return 0.0 * self.net(batch).sum()

    module = NoGradient(adamw(lr=0.1, weight_decay=0.5, fused=False))
    before = module.net[0].weight.detach().clone()
    decay = Modified(lambda mark, value, group: 0.1 if mark.steps >= 2 else value, key="weight_decay")
    trainer = quiet_trainer(decay, max_steps=3)
    trainer.fit(module, TinyData())
    expected = before * (1 - 0.1 * 0.5) * (1 - 0.1 * 0.5) * (1 - 0.1 * 0.1)
    torch.testing.assert_close(module.net[0].weight.detach(), expected, rtol=1e-6, atol=0)
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.5


def test_groups_are_counted_over_all_optimizers() -> None:
    class Two(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.manual_backward(self.net(batch).square().mean())
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[3].parameters(), 0.2)]

    rates = Rates()
    trainer = quiet_trainer(Modified(lambda mark, lr, group: 10.0 + group), rates, max_steps=2)
    trainer.fit(Two(), TinyData())
    assert rates.used == [[10.0, 11.0]]
    assert [o.param_groups[0]["lr"] for o in trainer.optimizers] == [0.1, 0.2]


def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    module = TinyModule(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5), capturable=False, foreach=False))
    rates = Rates()
    trainer = quiet_trainer(Modified(lambda mark, lr, group: 0.25 * lr), rates, max_steps=2)
    held: list[Any] = []
    watch = Watch("on_train_start", lambda t: held.append(t.optimizers[0].param_groups[0]["lr"]))
    trainer.callbacks.append(watch)  # type: ignore[attr-defined]
    trainer.fit(module, TinyData())
    assert rates.used == [[0.125], [0.125]]
    assert trainer.optimizers[0].param_groups[0]["lr"] is held[0]
    assert float(held[0]) == 0.5


def test_a_step_outside_a_batch_is_not_modified() -> None:
    """torch's distributed state getter takes one with all rates at 0 when it finds no state."""
    seen: list[float] = []

    def save(trainer: Any, *rest: Any) -> None:
        optimizer = trainer.optimizers[0]
        group = optimizer.param_groups[0]
        own, group["lr"] = group["lr"], 0.0
        optimizer.register_step_post_hook(lambda o, a, k: seen.append(group["lr"]))
        optimizer.step(closure=None)
        group["lr"] = own

    trainer = quiet_trainer(
        Modified(lambda mark, lr, group: 7.0), Watch("on_train_start", save), max_steps=1, log_every_n_steps=0
    )
    trainer.fit(TinyModule(), TinyData())
    assert seen == [0.0, 0.05]  # the last: our hook, registered before this one, has put the rate back


class Fails(TinyModule):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            raise RuntimeError("bad batch")
        return super().training_step(batch, batch_idx)


def test_a_step_that_raises_leaves_the_schedulers_rate_behind_and_a_second_fit_works() -> None:
    rates = Rates()
    trainer = quiet_trainer(Modified(lambda mark, lr, group: 0.5 * lr), rates, max_steps=4)
    with pytest.raises(RuntimeError, match="bad batch"):
        trainer.fit(Fails(), TinyData())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05
    train_more(trainer, 2)
    trainer.fit(TinyModule(), TinyData())
    assert rates.used == [[0.025]] * 4
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


def test_a_module_that_sets_the_rate_within_the_step_is_refused_when_a_modifier_acts_and_left_alone_otherwise() -> None:
    class SetsLate(TinyModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + self.trainer.global_step)

    trainer = quiet_trainer(Modified(lambda mark, lr, group: 0.5 * lr), max_steps=2)
    with pytest.raises(MisconfigurationException, match=r"lr was set to 0.025 .* else made it 0.01 .* by a scheduler"):
        trainer.fit(SetsLate(), TinyData())
    rates = Rates()
    trainer = quiet_trainer(EffectiveLR(), rates, max_steps=2)
    trainer.fit(SetsLate(), TinyData())
    assert rates.used == [[0.01], [0.02]]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.02


def test_logs_the_used_rate_and_its_ratio_to_the_schedulers_at_logging_steps(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(
        Modified(half_from(2)), AccumulationWindows(4, 2), logger=logger, log_every_n_steps=2, max_steps=4
    )
    trainer.fit(TinyModule(), TinyData())
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    columns = [header.split(",").index(f"stability/{name}") for name in ("lr", "lr_factor")]
    values = [[float(row.split(",")[c]) for c in columns] for row in rows]
    torch.testing.assert_close(torch.tensor(values), torch.tensor([[0.05, 1.0], [0.025, 0.5]]))


def test_of_a_rate_of_zero_the_ratio_that_is_logged_is_one_until_something_raises_it() -> None:
    for modifier, factor in ((half_from(9), 1.0), (lambda mark, lr, group: 0.1, math.inf)):
        trainer = quiet_trainer(Modified(modifier), max_steps=1, log_every_n_steps=1)
        trainer.fit(TinyModule(adamw(lr=0.0)), TinyData())
        assert trainer.callback_metrics["stability/lr_factor"] == factor


def test_a_schedule_of_the_lightning_module_keeps_working_under_modifiers() -> None:
    """GPTModule sets the rate of its groups in ``on_train_batch_start``."""
    from tiny_gpt_run import fit

    rates = Rates()
    run = fit(steps=4, callbacks=(Modified(half_from(2)), rates))
    schedule = run.module.schedule
    own = [schedule.lr(8 * k) for k in range(4)]
    assert [r[0] for r in rates.used] == [lr * (0.5 if k >= 2 else 1) for k, lr in enumerate(own)]
    assert [row[2] for row in run.rows] == own  # between steps the module's own rate stands


def test_no_warning_about_the_order_of_steps_is_caused() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        trainer = quiet_trainer(Modified(half_from(1)), max_steps=3)
        trainer.fit(Scheduled(SCHEDULERS["CosineAnnealingLR"]), TinyData())
