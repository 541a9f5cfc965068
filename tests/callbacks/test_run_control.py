"""Orders are carried out once, at a boundary, on record; a changed rate is in force after any resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from tiny_fit import TinyData, TinyModule, assert_same_bits, quiet_trainer, sample, snapshot
from torch.utils.data import DataLoader

from lit_stable.callbacks import AccumulationWindows, EffectiveLR, KillFileExists, Progress, RunControl
from lit_stable.callbacks.control_orders import INBOX, LEDGER, new_order, place, read_ledger


class Says(Callback):
    """Gives orders from outside in the middle of steps: step, counted from 1 -> words; notes the rate of each step."""

    def __init__(self, folder: Path, plan: dict[int, list[str]] | None = None, save_at: tuple[int, ...] = ()) -> None:
        self.folder, self.plan, self.save_at = folder, plan or {}, save_at
        self.rates: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not batch_idx % 2:
            for words in self.plan.pop(Progress.of(trainer).steps + 1, []):
                place(self.folder, new_order(words))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        effective = next((c for c in trainer.callbacks if isinstance(c, EffectiveLR)), None)
        if Progress.of(trainer).pending_samples:
            return
        steps = Progress.of(trainer).steps
        self.rates[steps] = effective.used["lr"][0] if effective and effective.used else 0.05
        if steps in self.save_at:
            trainer.save_checkpoint(self.folder / f"{steps}.ckpt")


def run(folder: Path, plan: dict[int, list[str]] | None = None, **options: Any) -> tuple[Any, Says, RunControl]:
    folder.mkdir(exist_ok=True)
    control = RunControl(folder=str(folder), **options.pop("control", {}))
    says = Says(folder, plan, options.pop("save_at", ()))
    resume, module = options.pop("resume", None), options.pop("module", None)
    data = options.pop("data", None)
    options = {"max_steps": 6, "check_val_every_n_epoch": None, "val_check_interval": 1_000_000, **options}
    trainer = quiet_trainer(control, AccumulationWindows(4, 2), says, **options)
    trainer.fit(module or TinyModule(), data or TinyData(validation_batches=1), ckpt_path=resume)
    return trainer, says, control


def test_orders_are_carried_out_at_the_end_of_the_step_in_which_they_come(tmp_path: Path) -> None:
    trainer, says, control = run(tmp_path, {2: ["save", "lr*=0.5"], 3: ["validate"], 4: ["lr*=0.5"], 5: ["stop"]})
    assert trainer.global_step == 5
    assert control.stopped
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["asked-step=2.ckpt", "stopped-step=5.ckpt"]
    assert trainer.lightning_module.validated_after == [3]
    assert says.rates == pytest.approx({1: 0.05, 2: 0.05, 3: 0.025, 4: 0.025, 5: 0.0125})
    found = [(done.number, done.step, done.action, done.factor) for done in read_ledger(tmp_path)]
    assert found == [
        (1, 2, "save", None),
        (2, 2, "lr", 0.5),
        (3, 3, "validate", None),
        (4, 4, "lr", 0.5),
        (5, 5, "stop", None),
    ]
    assert not list((tmp_path / INBOX).iterdir())


class ShortEpochs(TinyData):
    """Epochs of four micro-batches, which are two steps."""

    def __init__(self) -> None:
        super().__init__(validation_batches=1)

    def train_dataloader(self) -> Any:
        return DataLoader([sample(number)[None].repeat(2, 1) for number in range(4)], batch_size=None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"check_val_every_n_epoch": 2}, [1, 4]),
        ({"check_val_every_n_epoch": 100}, [1]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 2}, [1, 3, 4]),
        ({"check_val_every_n_epoch": None, "val_check_interval": "01:00:00:00"}, [1]),
    ],
)
def test_a_validation_is_made_however_seldom_the_trainer_makes_its_own(
    tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    if isinstance(options.get("val_check_interval"), str) and not hasattr(
        Trainer(logger=False), "_val_check_time_interval"
    ):
        pytest.skip("this Lightning does not validate by the clock")
    trainer, *_ = run(tmp_path, {1: ["validate"]}, data=ShortEpochs(), **{"val_check_interval": 1.0, **options})
    assert trainer.lightning_module.validated_after == expected
    assert trainer.check_val_every_n_epoch == options["check_val_every_n_epoch"]


class Counts(Callback):
    """Learns something at the end of every batch."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}


def test_a_save_holds_what_callbacks_behind_it_and_the_module_do_at_the_end_of_the_batch(tmp_path: Path) -> None:
    class Buffered(TinyModule):
        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

    module = Buffered()
    module.register_buffer("batches", torch.zeros(()))
    control = RunControl(folder=str(tmp_path))
    says = Says(tmp_path, {2: ["save", "lr*=0.5"], 4: ["stop"]})
    options: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 2}
    quiet_trainer(control, says, Counts(), **options).fit(module, TinyData())
    for name, batches in (("asked-step=2", 4), ("stopped-step=4", 8)):
        saved = torch.load(tmp_path / f"{name}.ckpt")
        assert saved["callbacks"]["Counts"] == {"batches": batches}
        assert saved["state_dict"]["batches"] == batches
        assert len(saved["callbacks"]["RunControl"]["changes"]) == batches // 8, "in the order in which they came"
        assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"] == batches - 1


def test_without_an_order_nothing_is_on_the_optimizer_or_in_the_log_and_no_bit_differs(tmp_path: Path) -> None:
    steered, *_ = run(tmp_path, log_every_n_steps=1)
    bare = quiet_trainer(AccumulationWindows(4, 2), max_steps=6, log_every_n_steps=1)
    bare.fit(TinyModule(), TinyData())
    assert_same_bits(snapshot(steered), snapshot(bare))
    assert steered.callback_metrics.keys() - {"val_loss"} == bare.callback_metrics.keys()
    assert not any(isinstance(c, EffectiveLR) for c in steered.callbacks)


def test_with_one_it_logs_what_is_in_force(tmp_path: Path) -> None:
    trainer, *_ = run(tmp_path, {2: ["lr*=0.5"], 4: ["lr*=0.5"]}, log_every_n_steps=1)
    found = {key: float(value) for key, value in trainer.callback_metrics.items() if "lr" in key}
    factors = {"stability/control_lr_factor": 0.25, "stability/lr_factor": 0.25}
    assert found == pytest.approx({"stability/lr": 0.0125, **factors})


def test_a_changed_rate_is_in_force_from_the_same_step_on_after_a_resume_from_before_it(tmp_path: Path) -> None:
    straight, says, _ = run(tmp_path, {3: ["lr*=0.5"]}, save_at=(2, 4))
    for saved in (2, 4):
        resumed, again, _ = run(tmp_path, resume=tmp_path / f"{saved}.ckpt")
        assert again.rates == {step: rate for step, rate in says.rates.items() if step > saved}
        assert_same_bits(snapshot(resumed), snapshot(straight))
    assert len(read_ledger(tmp_path)) == 1


@pytest.mark.parametrize(("at", "again"), [((4, 5), ()), ((), (4, 5))])
def test_a_branch_in_another_folder_knows_what_came_before_it_alone(
    at: tuple[int, ...], again: tuple[int, ...], tmp_path: Path
) -> None:
    run(tmp_path / "a", {4: ["lr*=0.5"]}, save_at=(2, *at))
    run(tmp_path / "a", save_at=(3, *again), resume=tmp_path / "a" / "2.ckpt")  # which knows from the ledger what comes
    for saved, rate in ((2, 0.05), (3, 0.05), (4, 0.05), (5, 0.025)):  # it is carried out behind the hooks of step 4
        _, says, _ = run(tmp_path / f"from-{saved}", resume=tmp_path / "a" / f"{saved}.ckpt")
        assert set(says.rates.values()) == {rate}


def test_another_run_in_the_same_folder_is_not_concerned(tmp_path: Path) -> None:
    run(tmp_path, {1: ["lr*=0.5"]})
    _, says, _ = run(tmp_path, save_at=(2,))
    assert set(says.rates.values()) == {0.05}
    assert set(run(tmp_path, resume=tmp_path / "2.ckpt")[1].rates.values()) == {0.05}


def test_what_is_on_record_already_is_not_done_again(tmp_path: Path) -> None:
    """Killed between the line and the removal of the file."""
    order = new_order("stop")
    place(tmp_path, order)
    run(tmp_path)
    place(tmp_path, order)
    trainer, _, control = run(tmp_path)
    assert (trainer.global_step, control.stopped) == (6, False)
    assert not list((tmp_path / INBOX).iterdir())


def test_what_cannot_be_recorded_waits_and_a_stop_does_not(tmp_path: Path) -> None:
    (tmp_path / LEDGER).mkdir()  # nothing can be written there
    with pytest.warns(UserWarning, match="only a stop is heeded"):
        trainer, says, control = run(tmp_path, {1: ["lr*=0.5"], 4: ["stop"]})
    assert (trainer.global_step, control.stopped) == (4, True)
    assert set(says.rates.values()) == {0.05}
    waiting = [json.loads(path.read_text())["action"] for path in sorted((tmp_path / INBOX).iterdir())]
    assert waiting == ["lr", "stop"]


def test_the_kill_file_stops_and_lets_nothing_begin(tmp_path: Path) -> None:
    class Kills(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 2:
                (tmp_path / "STOP").touch()
            return super().training_step(batch, batch_idx)

    trainer, _, control = run(tmp_path, module=Kills())
    assert (trainer.global_step, control.stopped) == (3, True)
    assert (tmp_path / "stopped-step=3.ckpt").exists()
    with pytest.raises(KillFileExists, match="STOP: exists, and while it does nothing is trained"):
        run(tmp_path)
    (tmp_path / "STOP").unlink()
    assert run(tmp_path)[0].global_step == 6


def test_it_looks_at_every_nth_boundary(tmp_path: Path) -> None:
    trainer, *_ = run(tmp_path, {1: ["stop"]}, control={"every_steps": 4})
    assert trainer.global_step == 4


@pytest.mark.parametrize("words", ["halt", "lr*=0", "lr*=x", "lr*=inf", "lr*=-1", "lr=1"])
def test_what_is_no_order_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"is no order|must be a number above 0"):
        new_order(words)


def test_a_second_fit_of_the_same_trainer_is_not_stopped(tmp_path: Path) -> None:
    trainer, _, control = run(tmp_path, {2: ["stop"]})
    trainer.fit(trainer.lightning_module, TinyData(validation_batches=1))
    assert (trainer.global_step, control.stopped) == (6, False)
    assert trainer.limit_val_batches == 1.0
