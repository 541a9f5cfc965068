from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from text_logger import TextLogger
from tiny_fit import TinyData, TinyModule, Watch, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import Detectors, Event, Events, Progress
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.events import read_events
from lit_stable.callbacks.plateau import Plateau
from lit_stable.callbacks.scalars import Scalars
from lit_stable.callbacks.spike_alarm import SpikeAlarm
from lit_stable.callbacks.surge import Surge

QUICK = SpikeAlarm(window=8, warmup=4, z_score=6.0, min_spread=0.5)


def watching(**options: Any) -> Detectors:
    """One that is sure of its band after four steps."""
    return Detectors(spike=QUICK, **options)


def events_of(trainer: Trainer) -> list[Event]:
    return read_events(Path(trainer.default_root_dir) / "events.jsonl")


def test_a_spike_is_told_with_its_step_and_samples(tmp_path: Path) -> None:
    trainer = quiet_trainer(watching(), max_steps=12, default_root_dir=tmp_path, logger=(own := TextLogger()))
    trainer.fit(TinyModule(poison={9: 1e4}), TinyData(batch_size=2))
    found = events_of(trainer)
    assert {(e.step, e.kind, e.evidence["signal"]) for e in found} == {
        *((10, "spike", "loss"), (10, "spike", "grad_norm")),
    }
    assert [e.samples for e in found] == [[18, 20]] * 2
    assert [key for key, *_ in own.texts] == ["events/spike"] * 2


def test_nan_is_told_and_the_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    trainers = quiet_trainer(max_steps=8), quiet_trainer(watching(), max_steps=8, default_root_dir=tmp_path)
    for trainer in trainers:
        trainer.fit(TinyModule(dropout=0.5, poison={5: math.nan}), TinyData())
    assert {(e.step, e.kind) for e in events_of(trainers[1])} == {(6, "not_finite")}
    assert_same_bits(*map(snapshot, trainers))


class GrowsBackwards(TinyModule):
    """Its gradient is multiplied at some optimizer steps, while the loss is as ever."""

    def on_after_backward(self) -> None:
        self.net[0].weight.grad.mul_({6: math.inf, 9: 1e4}.get(self.trainer.global_step, 1.0))


def test_under_a_loss_scale_an_overflow_is_no_event_and_a_spike_of_the_norm_is_one(tmp_path: Path) -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    trainer = quiet_trainer(watching(), max_steps=12, default_root_dir=tmp_path, plugins=[scaled])
    trainer.fit(GrowsBackwards(), TinyData())
    assert [(e.step, e.kind, e.evidence["signal"]) for e in events_of(trainer)] == [(10, "spike", "grad_norm")]


@pytest.mark.parametrize("cut", [4, 10, 11])
def test_a_resume_says_what_an_uninterrupted_run_says(tmp_path: Path, cut: int) -> None:
    def run(folder: str, steps: int, **fit: Any) -> list[Event]:
        save = Watch(
            "on_train_batch_end", lambda t, *rest: t.save_checkpoint(tmp_path / f"{folder}-{t.global_step}.ckpt")
        )
        trainer = quiet_trainer(watching(), save, max_steps=steps, default_root_dir=tmp_path / folder)
        trainer.fit(TinyModule(poison={9: 1e4, 15: 1e4}), TinyData(), **fit)
        return events_of(trainer) if (tmp_path / folder).exists() else []

    whole = run("whole", 18)
    assert {e.step for e in whole} == {10, 16}
    before = run("cut", cut)
    assert run("cut", 18, ckpt_path=tmp_path / f"cut-{cut}.ckpt", weights_only=True) == whole
    assert before == [e for e in whole if e.step <= cut]


class LogsAScalar(Callback):
    """Logs a quantity that grows by a factor at every step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.log("activation/fc2", 1.05**trainer.global_step)


def test_a_logged_scalar_that_grows_is_a_surge(tmp_path: Path) -> None:
    detectors = Detectors(surge=Surge(["activation/*"], window=20, warmup=0))
    trainer = quiet_trainer(
        *(detectors, LogsAScalar()), max_steps=120, log_every_n_steps=5, default_root_dir=tmp_path, logger=TextLogger()
    )
    trainer.fit(TinyModule(), TinyData())
    surges = [e for e in events_of(trainer) if e.kind == "surge"]
    assert [e.evidence["signal"] for e in surges] == ["activation/fc2"]


class LogsNowAndThen(Callback):
    """Logs a quantity in every third step, at one hook."""

    def __init__(self, hook: str, by_scalars: bool) -> None:
        self.by_scalars = by_scalars
        setattr(self, hook, self._log)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        Scalars.of(trainer)

    def _log(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = Progress.of(trainer).start.steps + 1
        if step % 3 == 0 and self.by_scalars:
            Scalars.of(trainer).add(["activation/fc2"], [float(step)])
        elif step % 3 == 0:
            pl_module.log("activation/fc2", float(step))


@pytest.mark.parametrize("by_scalars", [False, True])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize(("every", "window"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_logged_scalar_is_observed_in_the_steps_in_which_it_is_logged_alone_and_so_after_a_resume(
    by_scalars: bool, hook: str, every: int, window: int, is_ahead: bool, tmp_path: Path
) -> None:
    def run(*callbacks: Callback, **fit: Any) -> dict[int, float]:
        observed: dict[int, float] = {}

        def listen(step: int, values: Any) -> None:
            if "activation/fc2" in values:
                observed[step] = values["activation/fc2"]

        detectors = Detectors(surge=Surge(["activation/*"]))
        detectors.listeners["test"] = listen
        ours = [LogsNowAndThen(hook, by_scalars), Progress(), detectors]
        options: dict[str, Any] = {"log_every_n_steps": every, "accumulate_grad_batches": window}
        trainer = quiet_trainer(*(ours if is_ahead else ours[1:] + ours[:1]), *callbacks, max_steps=13, **options)
        trainer.fit(TinyModule(), TinyData(), **fit)
        return observed

    save = Watch("on_train_batch_end", lambda t, *rest: t.save_checkpoint(tmp_path / f"{t.global_step}.ckpt"))
    whole = run(save)
    assert whole == {step: step for step in range(3, 14, 3) if step % every == 0}
    for cut in (3, 4, 8):
        assert run(ckpt_path=tmp_path / f"{cut}.ckpt") == {step: n for step, n in whole.items() if step > cut}


class Validates(TinyModule):
    """A validation loss that no longer falls."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 2.0)


def test_validations_that_stall_are_a_plateau(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        *(Detectors(plateau=Plateau(patience=4)),),
        max_steps=10,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        default_root_dir=tmp_path,
    )
    trainer.fit(Validates(), TinyData(validation_batches=1))
    assert [(e.step, e.kind) for e in events_of(trainer)] == [(6, "plateau")]


def test_the_defaults_are_not_shared() -> None:
    one, other = Detectors(), Detectors()
    assert one.state_dict() == other.state_dict()
    one._detectors[0].observe(1, {"loss": 3.0})
    assert one.state_dict() != other.state_dict()


def test_refuses_to_watch_nothing_and_manual_optimization() -> None:
    nothing = dict.fromkeys(("spike", "slow_divergence", "plateau", "low_loss", "loss_scale", "surge"))
    with pytest.raises(MisconfigurationException, match="all detectors are null"):
        Detectors(**nothing)
    module = TinyModule()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="automatic_optimization=False"):
        quiet_trainer(Detectors()).fit(module, TinyData())


def test_listeners_hear_of_it(tmp_path: Path) -> None:
    heard: list[Event] = []
    trainer = quiet_trainer(watching(), max_steps=12, default_root_dir=tmp_path)
    Events.of(trainer).listeners["test"] = heard.append
    trainer.fit(TinyModule(poison={9: 1e4}), TinyData())
    assert heard == events_of(trainer)
