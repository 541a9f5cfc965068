"""Orders, the black box, the repeated micro-batch, clipped heads and replay on one CUDA device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from no_sync import NoSync
from tiny_fit import Watch, quiet_trainer
from tiny_gpt_run import GLOBAL_BATCH, MICRO_BATCH, NumberedData, tiny_module
from tiny_recipe import command, write_recipe

from lit_stable.callbacks import (
    AccumulationWindows,
    BlackBox,
    EffectiveLR,
    Events,
    GradClip,
    Progress,
    QKClip,
    RepeatCheck,
    RunControl,
    SafeCheckpoints,
    ScriptedSkip,
    StepSeed,
    emit,
)
from lit_stable.callbacks.control_orders import new_order, place, read_ledger
from lit_stable.callbacks.events import Event

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:step ")]

# So that the tests' own code can be tried where there is no such device.
HOST = "gpu" if CUDAAccelerator.is_available() else "cpu"


def at_the_end_of(step: int, act: Any) -> Watch:
    def watch(trainer: Any, *rest: Any) -> None:
        if Progress.of(trainer).steps == step and not Progress.of(trainer).pending_samples:
            act(trainer)

    return Watch("on_train_batch_end", watch)


def run(folder: Path, *callbacks: Callback, strategy: str = "auto", compile: str = "off") -> Trainer:
    channel = Events()
    channel.folder = folder
    spine = [AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH), StepSeed(3), SafeCheckpoints(), GradClip(0.5), channel]
    options = {"accelerator": HOST, "strategy": strategy, "precision": "bf16-mixed", "use_distributed_sampler": False}
    trainer = quiet_trainer(
        *(*spine, *callbacks, NoSync()), max_steps=12, limit_val_batches=0, log_every_n_steps=100, **options
    )
    trainer.fit(tiny_module(compile=compile, dropout=0.1), datamodule=NumberedData())
    assert trainer.global_step == 12
    return trainer


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
@pytest.mark.parametrize("compile", ["off", "on"] if HOST == "gpu" else ["off"])
def test_no_step_waits_for_the_device(strategy: str, compile: str, tmp_path: Path) -> None:
    alarm = at_the_end_of(11, lambda trainer: emit(trainer, Event(11, "drill", {})))
    repeats = RepeatCheck(every_steps=4)
    own = [BlackBox(steps=4, text_steps=2), repeats, QKClip(0.05), ScriptedSkip(steps=[5]), alarm]
    trainer = run(tmp_path, *own, RunControl(folder=str(tmp_path)), strategy=strategy, compile=compile)
    assert Progress.of(trainer).skipped == 1
    (record,) = (tmp_path / "blackbox").glob("step-00000011-drill/rank0.json")
    rows = json.loads(record.read_text())["steps"]
    assert [row["step"] for row in rows] == [8, 9, 10, 11]
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)


def test_an_order_is_carried_out_and_the_steps_after_it_wait_for_nothing(tmp_path: Path) -> None:
    own: list[float] = []
    used: list[float] = []

    def note(trainer: Any, *rest: Any) -> None:
        effective = next((c for c in trainer.callbacks if isinstance(c, EffectiveLR)), None)
        if effective is not None and not Progress.of(trainer).pending_samples and effective.used:
            own.append(effective.own["lr"][0])
            used.append(effective.used["lr"][0])

    order = Watch("on_train_start", lambda *_: place(tmp_path, new_order("lr*=0.5")))
    run(tmp_path, RunControl(folder=str(tmp_path)), order, Watch("on_train_batch_end", note))
    assert [(done.step, done.factor) for done in read_ledger(tmp_path)] == [(1, 0.5)]
    assert len(used) == 11, "from step 2 on"
    assert used == pytest.approx([0.5 * lr for lr in own])


@pytest.mark.parametrize("deterministic", ["false", "true"])
def test_a_replay_is_the_same_within_its_own_noise(deterministic: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = {"every_steps": 2, "first_step": 2, "keep_last": 9}
    recipe = write_recipe(tmp_path, trainer__accelerator=HOST, checkpoints=options, model__gpt__dropout=0.1)
    words = ["--trainer.deterministic", deterministic]
    assert command("fit", "--config", recipe, *words).code == 0
    done = command("replay", tmp_path / "runs" / "tiny" / "0001", "--step", "6", "--worst", "2")
    assert done.code == 0, done.out + done.err
    assert "same: steps 5 to 6, 2 logged" in done.out
    assert "outputs of all modules are finite" in done.out
    if deterministic == "true":
        assert "noise: none, replays are equal to the bit" in done.out
