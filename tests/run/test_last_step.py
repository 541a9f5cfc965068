"""However a fit ends, its last step is saved once, and what goes on from there is what never ended."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from tiny_fit import TinyData, TinyModule, assert_same_bits, quiet_trainer, snapshot
from tiny_recipe import command, write_recipe

from lit_stable.callbacks import (
    AccumulationWindows,
    GracefulStop,
    Progress,
    SafeCheckpoints,
    StepSeed,
    ValidateEverySteps,
)
from lit_stable.run.checkpoints import Checkpoints

STEPS = 9


class Stops(Callback):
    """Asks for an end at one hook, when that is called for the ``call``-th time."""

    def __init__(self, hook: str, call: int) -> None:
        self.left = call
        setattr(self, hook, self.count)

    def count(self, trainer: Trainer, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.stop(trainer)

    def stop(self, trainer: Trainer) -> None:
        trainer.should_stop = True


class Fails(Stops):
    def stop(self, trainer: Trainer) -> None:
        raise ArithmeticError


class Late(Timer):
    """Its time has run out after so many micro-batches."""

    def __init__(self, batches: int) -> None:
        super().__init__("00:00:00:01")
        self.batches = batches

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        self.batches -= 1
        super().on_train_batch_end(trainer, *args, **options)

    def time_elapsed(self, stage: Any = "train") -> float:
        return 2.0 if self.batches <= 0 else 0.0


class Averages(Callback):
    """Weights that the fit leaves behind are others than it trained, as with an average of them."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data.zero_()


def fit(
    folder: Path, *callbacks: Callback, window: int = 1, ckpt_path: Path | None = None, **options: Any
) -> tuple[dict[str, Any], list[int], Checkpoints]:
    """Bits at the end of the last batch, steps that were validated, and who saved."""
    bits: dict[str, Any] = {}

    class Bits(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            bits.update(snapshot(trainer))

    saves = Checkpoints(100, first_step=None, keep_last=9, keep_best=False, in_background=options.pop("behind", False))
    saves.folder = folder
    own = [Progress(), AccumulationWindows(2 * window, 2), StepSeed(1), SafeCheckpoints(saves.in_background)]
    own += [ValidateEverySteps(2), *callbacks, Bits()]
    options = {"max_steps": STEPS, "enable_checkpointing": True, "check_val_every_n_epoch": None, **options}
    trainer = quiet_trainer(*own, saves, **options)
    module = TinyModule(dropout=0.5)
    trainer.fit(module, TinyData(validation_batches=1), ckpt_path=ckpt_path)
    return bits, module.validated_after, saves


def saved(folder: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in (folder / "checkpoints").glob("*.ckpt"))


ENDS: dict[str, Any] = {  # micro-batches of a step, who asks for the end, and what else the trainer is told
    "at_a_step": (1, lambda: Stops("on_train_batch_end", 5), {}),
    "at_the_end_of_a_window": (3, lambda: Stops("on_train_batch_end", 15), {}),
    "in_mid_window": (3, lambda: Stops("on_train_batch_end", 16), {}),
    "in_the_first_hook": (3, lambda: Stops("on_train_batch_start", 17), {}),
    "in_a_step": (1, lambda: Stops("on_before_optimizer_step", 5), {}),
    "at_a_validation": (3, lambda: Stops("on_validation_end", 2), {}),
    "by_the_clock": (1, lambda: Late(5), {}),
    "by_the_clock_in_mid_window": (3, lambda: Late(16), {}),
    "with_an_epoch": (3, Callback, {"limit_train_batches": 15, "max_epochs": 1}),
}


@pytest.mark.parametrize("ends", [STEPS, -1], ids=["with_max_steps", "without"])
@pytest.mark.parametrize("end", ENDS)
def test_the_last_step_is_saved_and_what_goes_on_from_it_is_what_never_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, ends: int
) -> None:
    window, stop, options = ENDS[end]
    last = 4 if end == "at_a_validation" else 5
    _, _, saves = fit(tmp_path, stop(), Averages(), window=window, **{"max_steps": ends, **options})
    assert saved(tmp_path) == [last]
    assert capsys.readouterr().out.count("saved ") == len(saves.stalls) == 1
    straight, validated, _ = fit(tmp_path / "straight", window=window)
    more = Stops("on_train_batch_end", window * (STEPS - last) if ends == -1 else 0)
    path = tmp_path / "checkpoints" / f"step-{last:08d}.ckpt"
    resumed, also_validated, _ = fit(tmp_path / "on", more, window=window, ckpt_path=path, max_steps=ends)
    assert_same_bits(resumed, straight)
    assert also_validated == [step for step in validated if step > last]


def test_in_the_background_it_is_on_disk_when_the_fit_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, Stops("on_train_batch_end", 5), behind=True)
    assert saved(tmp_path) == [5]
    assert capsys.readouterr().out.count("saved ") == 1


def test_what_was_saved_on_a_signal_is_not_saved_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Signal(Stops):
        def stop(self, trainer: Trainer) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    _, validated, saves = fit(tmp_path, Signal("on_train_batch_start", 14), GracefulStop(), window=3, behind=True)
    assert (saved(tmp_path), validated) == ([5], [2, 4])
    assert capsys.readouterr().out.count("saved ") == len(saves.stalls) == 1


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_nothing_is_saved_behind_an_error(tmp_path: Path, hook: str) -> None:
    stops = [Stops("on_train_batch_end", 5)] if hook == "on_train_epoch_end" else []
    with pytest.raises(ArithmeticError):
        fit(tmp_path, *stops, Fails(hook, 1))
    assert saved(tmp_path) == []


def test_a_fit_that_takes_no_step_saves_nothing(tmp_path: Path) -> None:
    fit(tmp_path, Stops("on_train_batch_start", 1), window=3)
    assert saved(tmp_path) == []
    fit(tmp_path, Stops("on_train_batch_end", 3), window=3)
    assert saved(tmp_path) == [1]
    path = tmp_path / "checkpoints" / "step-00000001.ckpt"
    for max_steps in (1, STEPS):
        fit(tmp_path / "on", Stops("on_train_batch_start", 1), window=3, ckpt_path=path, max_steps=max_steps)
        assert saved(tmp_path / "on") == []


def test_the_closing_table_names_it(tmp_path: Path) -> None:
    early = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/loss"}}
    early["init_args"]["stopping_threshold"] = 1e9
    saves = {"every_steps": 100, "first_step": None, "keep_best": False}
    recipe = write_recipe(tmp_path, checkpoints=saves, stability__extra={"early": early})
    done = command("fit", "--config", recipe)
    assert done.code == 0, done.err
    path = tmp_path / "runs" / "tiny" / "0001" / "checkpoints" / "step-00000003.ckpt"
    assert re.search(rf"^checkpoint, last +{path}$", done.out, re.MULTILINE), done.out
    assert path.is_file()
