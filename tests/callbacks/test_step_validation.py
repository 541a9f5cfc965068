from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from hosts import Gan, loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from packaging.version import Version
from tiny_fit import (
    SaveAtSteps,
    TinyData,
    TinyModule,
    Watch,
    assert_same_bits,
    quiet_trainer,
    sample,
    snapshot,
    train_more,
)
from torch import Tensor
from torch.utils.data import DataLoader

from lit_stable.callbacks import (
    AccumulationWindows,
    BatchSizeWarmup,
    GracefulStop,
    Progress,
    StepSeed,
    ValidateEverySteps,
)
from lit_stable.callbacks.private_names import batches_that_stepped, window_is_open


def validated_after(
    *callbacks: Any, every: int | str = 3, steps: int = 7, resume: Path | None = None, micro_batches: int = 2
) -> list[int]:
    trainer = quiet_trainer(
        ValidateEverySteps(every),
        AccumulationWindows(2 * micro_batches, 2),
        *callbacks,
        max_steps=steps,
        check_val_every_n_epoch=None,
    )
    trainer.fit(module := TinyModule(), TinyData(validation_batches=2), ckpt_path=resume)
    return module.validated_after


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_validates_after_every_so_many_optimizer_steps_and_the_last(micro_batches: int) -> None:
    assert validated_after(micro_batches=micro_batches) == [3, 6, 7]
    assert validated_after(every=1, steps=3, micro_batches=micro_batches) == [1, 2, 3]
    assert validated_after(every=3, steps=6, micro_batches=micro_batches) == [3, 6]
    assert validated_after(every=100, steps=4, micro_batches=micro_batches) == [4]


@pytest.mark.parametrize(("saved_at", "expected"), [("start", [3, 6, 7]), ("micro-7", [6, 7]), ("micro-8", [6, 7])])
def test_a_resume_shifts_nothing(saved_at: str, expected: list[int], tmp_path: Path) -> None:
    validated_after(SaveAtSteps(tmp_path), steps=6)
    assert validated_after(resume=tmp_path / f"{saved_at}.ckpt") == expected


class Measured(TinyModule):
    """Keeps what each validation batch sees: the step, that in the log, the set, the loss, a random number."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.seen: list[tuple[Any, ...]] = []

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = float(self.net(batch).square().mean())
        self.log("measured", loss)
        where = self.trainer.global_step, batches_that_stepped(self.trainer), dataloader_idx
        self.seen.append((*where, loss, float(batch.sum()), float(torch.rand(()))))


class TwoSets(TinyData):
    """Two validation sets, read in a random order."""

    def val_dataloader(self) -> Any:
        return [DataLoader([sample(first + i) for i in range(5)], shuffle=True) for first in (100, 200)]  # type: ignore[arg-type]


def measured(
    *callbacks: Any, every: int | str = 3, windows: int = 2, steps: int = 7, resume: Path | None = None
) -> tuple[list[tuple[Any, ...]], Any]:
    options: dict[str, Any] = {"max_steps": steps, "check_val_every_n_epoch": None}
    ours = StepSeed(1), AccumulationWindows(2 * windows, 2), ValidateEverySteps(every)
    trainer = quiet_trainer(*ours, *callbacks, **options)
    torch.manual_seed(0 if resume is None else 1)
    trainer.fit(module := Measured(), TwoSets(), ckpt_path=resume)
    return module.seen, snapshot(trainer)


def saved_at(hook: str, step: int, folder: Path) -> Any:
    def save(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == step and not window_is_open(trainer):
            trainer.save_checkpoint(folder / "a.ckpt")

    return Watch(hook, save)


BEFORE = ["on_train_batch_end", "on_validation_start", "on_validation_batch_end"]


@pytest.mark.parametrize("hook", [*BEFORE, "on_validation_end"])
@pytest.mark.parametrize(("every", "windows"), [(3, 1), (3, 2), ("11 samples", 2), ("20 tokens", 1)])
def test_one_that_is_due_where_a_checkpoint_is_written_is_made_first_by_who_goes_on_unless_it_was_made(
    hook: str, every: int | str, windows: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"every": every, "windows": windows}
    straight, weights = measured(saved_at(hook, 3, tmp_path), **options)
    assert {row[0] for row in straight} >= {3, 7}
    resumed, same_weights = measured(resume=tmp_path / "a.ckpt", **options)
    first = 3 if hook in BEFORE else 4
    assert resumed == [row for row in straight if row[0] >= first]
    assert_same_bits(same_weights, weights)


def test_one_that_is_made_first_is_not_made_again_from_a_checkpoint_behind_it_nor_lost_before_it(
    tmp_path: Path,
) -> None:
    straight, _ = measured(saved_at("on_train_batch_end", 3, tmp_path))
    for hook, first in (("on_train_start", 3), ("on_validation_start", 3), ("on_validation_end", 4)):
        resumed, _ = measured(saved_at(hook, 3, tmp_path), resume=tmp_path / "a.ckpt")
        assert resumed == [row for row in straight if row[0] >= 3], hook
        again, _ = measured(resume=tmp_path / "a.ckpt")
        assert again == [row for row in straight if row[0] >= first], hook


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_a_stop_has_left_out_is_made_by_who_goes_on(number: int, tmp_path: Path) -> None:
    def interrupt(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), number)

    straight, weights = measured(windows=1)
    stopped, _ = measured(Watch("on_before_backward", interrupt), GracefulStop(str(tmp_path)), windows=1)
    resumed, same_weights = measured(windows=1, resume=tmp_path / "stopped-step=6.ckpt")
    assert [*stopped, *resumed] == straight
    assert_same_bits(same_weights, weights)


def test_the_last_one_of_a_fit_is_none_of_a_longer_fit(tmp_path: Path) -> None:
    measured(saved_at("on_train_batch_end", 4, tmp_path), steps=4)
    assert {row[0] for row in measured(resume=tmp_path / "a.ckpt")[0]} == {6, 7}


@pytest.mark.parametrize("windows", [1, 2])
def test_one_that_is_due_with_the_end_of_an_epoch_is_made_first_too(windows: int, tmp_path: Path) -> None:
    def fit(*callbacks: Any, resume: Path | None = None) -> list[int]:
        options: dict[str, Any] = {"max_steps": 9, "check_val_every_n_epoch": None}
        ours = ValidateEverySteps(3), AccumulationWindows(windows, 1)
        batches = DataLoader([sample(i)[None] for i in range(3 * windows)], batch_size=None)  # type: ignore[arg-type]
        trainer = quiet_trainer(*ours, *callbacks, **options)
        trainer.fit(module := TinyModule(), batches, batches, ckpt_path=resume)
        assert trainer.current_epoch == 3
        return module.validated_after

    assert fit(saved_at("on_train_batch_end", 3, tmp_path)) == [3, 6, 9]
    assert fit(resume=tmp_path / "a.ckpt") == [3, 6, 9]


def test_a_checkpoint_that_does_not_say_goes_on_as_ever(tmp_path: Path) -> None:
    measured(saved_at("on_train_batch_end", 3, tmp_path))
    checkpoint = torch.load(tmp_path / "a.ckpt")
    del checkpoint["callbacks"]["ValidateEverySteps"]
    torch.save(checkpoint, tmp_path / "a.ckpt")
    assert {row[0] for row in measured(resume=tmp_path / "a.ckpt")[0]} == {6, 7}


def test_without_validation_none_is_owed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "check_val_every_n_epoch": None}
    saves = saved_at("on_train_batch_end", 3, tmp_path)
    quiet_trainer(ValidateEverySteps(3), saves, limit_val_batches=0, **options).fit(TinyModule(), TinyData())
    trainer = quiet_trainer(ValidateEverySteps(3), **options)
    trainer.fit(module := TinyModule(), TinyData(validation_batches=1), ckpt_path=tmp_path / "a.ckpt")
    assert module.validated_after == [4]
    assert not {"advance", "_should_accumulate"} & vars(trainer.fit_loop.epoch_loop).keys()


@pytest.mark.parametrize("every", ["10 samples", "40 tokens"])
@pytest.mark.parametrize("saved_at", [None, "micro-3", "micro-6"])
def test_in_samples_or_tokens_it_follows_a_ramp_also_when_resumed(
    every: str, saved_at: str | None, tmp_path: Path
) -> None:
    def fit(*callbacks: Any, resume: Path | None = None) -> list[int]:
        ramp = BatchSizeWarmup("4 for 2 steps", global_batch=8, micro_batch=2)
        options: dict[str, Any] = {"max_steps": 6, "check_val_every_n_epoch": None}
        trainer = quiet_trainer(ValidateEverySteps(every), ramp, *callbacks, **options)
        trainer.fit(module := TinyModule(), TinyData(validation_batches=1), ckpt_path=resume)
        return module.validated_after

    # 4, 8, 16, 24, 32 and 40 samples: 10 within step 3, 20 in 4, 30 in 5, 40 at the end of 6.
    if saved_at is None:
        assert fit() == [3, 4, 5, 6]
    else:  # in mid-window of step 2, of step 3
        fit(SaveAtSteps(tmp_path))
        assert fit(resume=tmp_path / f"{saved_at}.ckpt") == [3, 4, 5, 6]


def test_a_run_that_is_told_to_stop_validates_first_and_one_that_gets_a_signal_does_not(tmp_path: Path) -> None:
    def stop(trainer: Any, *rest: Any) -> None:
        trainer.should_stop = trainer.global_step == 4

    def interrupt(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 3:  # the step under way is the fourth
            os.kill(os.getpid(), signal.SIGINT)

    assert validated_after(Watch("on_train_batch_end", stop)) == [3, 4]
    assert validated_after(Watch("on_before_backward", interrupt), GracefulStop(str(tmp_path)), micro_batches=1) == [3]


def test_a_second_fit_validates_as_the_first() -> None:
    trainer = quiet_trainer(ValidateEverySteps(3), max_steps=4, check_val_every_n_epoch=None)
    module, data = TinyModule(), TinyData(validation_batches=1)
    trainer.fit(module, data)
    train_more(trainer, 4)
    trainer.fit(module, data)
    assert module.validated_after == [3, 4, 6, 8]


@pytest.mark.parametrize("every_n_epochs", [1, 2])
def test_loaders_that_are_made_anew_each_epoch_shift_nothing(every_n_epochs: int) -> None:
    options = {"check_val_every_n_epoch": None, "reload_dataloaders_every_n_epochs": every_n_epochs}
    trainer = quiet_trainer(ValidateEverySteps(4), max_steps=18, **options)
    batches = DataLoader([sample(i)[None] for i in range(5)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module := TinyModule(), batches, batches)
    assert module.validated_after == [4, 8, 12, 16, 18]


def test_without_validation_data_nothing_is_touched() -> None:
    seen: list[Any] = []
    watch = Watch("on_train_batch_start", lambda trainer, *rest: seen.append(trainer.val_check_batch))
    trainer = quiet_trainer(
        ValidateEverySteps(3), watch, max_steps=1, check_val_every_n_epoch=None, limit_val_batches=0
    )
    trainer.fit(TinyModule(), TinyData())
    assert seen == [float("inf")]


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`ValidateEverySteps\(every=0\)`: must be at least 1"):
        ValidateEverySteps(0)


def test_a_trainer_that_validates_by_epochs_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`Trainer\(check_val_every_n_epoch=1\)`: .* to None"):
        quiet_trainer(ValidateEverySteps(3)).fit(TinyModule(), TinyData())


@pytest.mark.skipif(Version(lightning.__version__) < Version("2.6"), reason="Lightning has no clock for it before")
def test_a_trainer_that_validates_by_the_clock_is_refused() -> None:
    options = {"val_check_interval": "00:00:10:00", "check_val_every_n_epoch": None}
    with pytest.raises(MisconfigurationException, match=r"val_check_interval=...\)`: is a time"):
        quiet_trainer(ValidateEverySteps(3), **options).fit(TinyModule(), TinyData())


def test_optimizers_that_step_on_one_batch_take_one_step_together() -> None:
    class Watched(Gan):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                seen.append(Progress.of(self.trainer).steps)

    seen: list[int] = []
    trainer = quiet_trainer(ValidateEverySteps(2), max_steps=-1, max_epochs=2, check_val_every_n_epoch=None)
    trainer.fit(Watched(), loader(), loader())
    assert seen == [2, 4, 6]


def test_nothing_to_validate_with_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lit_stable.callbacks.step_validation.rank_zero_warn", said.append)
    for limit in (0, 1.0):
        options = {"limit_val_batches": limit, "check_val_every_n_epoch": None}
        quiet_trainer(ValidateEverySteps(2), max_steps=1, **options).fit(TinyModule(), loader())
    assert len(said) == 1
    assert "nothing to validate with; give trainer.fit `val_dataloaders`" in said[0]


def test_a_fast_dev_run_validates_as_it_does() -> None:
    trainer = quiet_trainer(ValidateEverySteps(3), fast_dev_run=True, check_val_every_n_epoch=None)
    trainer.fit(module := TinyModule(), TinyData(validation_batches=1))
    assert module.validated_after == [1]
