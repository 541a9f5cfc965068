from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Script
from hosts import Manual, loader
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from tiny_fit import TinyData, TinyModule, Watch, assert_same_bits, quiet_trainer, snapshot, train_more

from lit_stable.callbacks import AccumulationWindows, GracefulStop, Progress
from lit_stable.callbacks.base import MisconfigurationException

SIGNALS = (signal.SIGINT, signal.SIGTERM)
either_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)


@pytest.fixture(autouse=True)
def handlers_are_as_before() -> Iterator[None]:
    before = [signal.getsignal(n) for n in SIGNALS]
    yield
    after = [signal.getsignal(n) for n in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert after == before


class Signals(TinyModule):
    """Sends signals to its own process in the middle of the training step of given micro-batches."""

    def __init__(self, plan: dict[int, list[int]]) -> None:
        super().__init__()
        self.plan = plan
        self.micro_batches = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        for number in self.plan.get(batch_idx, []):
            os.kill(os.getpid(), number)
        self.micro_batches += 1
        return super().training_step(batch, batch_idx)


def trainer_that_stops(folder: Path, *callbacks: Any, **options: Any) -> Any:
    return quiet_trainer(
        GracefulStop(), AccumulationWindows(6, 2), *callbacks, default_root_dir=folder, **{"max_steps": 5, **options}
    )


@either_signal
def test_a_signal_in_mid_step_stops_at_the_boundary_with_one_checkpoint(number: int, tmp_path: Path) -> None:
    trainer = trainer_that_stops(tmp_path)
    module = Signals({3: [number]})  # the first of the three micro-batches of step 2
    trainer.fit(module, TinyData())
    assert (trainer.global_step, module.micro_batches) == (2, 6)
    assert os.listdir(tmp_path) == ["stopped-step=2.ckpt"]
    assert next(c for c in trainer.callbacks if isinstance(c, GracefulStop)).signal == number


@either_signal
def test_going_on_from_its_checkpoint_equals_never_having_stopped(number: int, tmp_path: Path) -> None:
    straight = trainer_that_stops(tmp_path)
    straight.fit(TinyModule(), TinyData())
    trainer_that_stops(tmp_path).fit(Signals({4: [number]}), TinyData())
    resumed = trainer_that_stops(tmp_path)
    resumed.fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "stopped-step=2.ckpt")
    assert_same_bits(snapshot(resumed), snapshot(straight))


class Averages(Callback):
    """Keeps a sum of the weights that every step ends with, and saves it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen.append(float(pl_module.net[0].weight.sum()))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = list(state_dict["seen"])


class AveragesLate(Averages, Checkpoint):
    """The same behind what saves: Lightning puts those of this kind at the end."""


@either_signal
@pytest.mark.parametrize("kind", [Averages, AveragesLate])
def test_what_others_do_at_the_end_of_the_batch_is_in_the_checkpoint(number: int, kind: Any, tmp_path: Path) -> None:
    def fit(module: TinyModule, resume: Path | None = None) -> list[float]:
        own = kind()
        options = {"default_root_dir": tmp_path, "enable_checkpointing": True}
        trainer = quiet_trainer(GracefulStop(), Progress(), own, max_steps=5, **options)
        trainer.fit(module, TinyData(), ckpt_path=resume)
        assert "on_batch_end" not in vars(trainer._logger_connector)
        return own.seen

    straight = fit(TinyModule())
    assert fit(Signals({2: [number]})) == straight[:3]
    assert fit(TinyModule(), tmp_path / "stopped-step=3.ckpt") == straight


def test_several_sigterms_are_one(tmp_path: Path) -> None:
    trainer = trainer_that_stops(tmp_path)
    trainer.fit(Signals({3: [signal.SIGTERM] * 3, 4: [signal.SIGTERM]}), TinyData())
    assert trainer.global_step == 2
    assert os.listdir(tmp_path) == ["stopped-step=2.ckpt"]


@pytest.mark.parametrize("before", [[], [signal.SIGTERM]], ids=["alone", "after_sigterm"])
def test_a_second_sigint_ends_at_once(before: list[int], tmp_path: Path) -> None:
    trainer = trainer_that_stops(tmp_path)
    module = Signals({3: [*before, signal.SIGINT], 4: [signal.SIGINT]})
    with pytest.raises(SystemExit) as stopped:  # Lightning turns KeyboardInterrupt into an exit with code 1
        trainer.fit(module, TinyData())
    assert stopped.value.code == 1
    assert isinstance(stopped.value.__context__, KeyboardInterrupt)
    assert module.micro_batches == 4
    assert os.listdir(tmp_path) == []


def test_a_callback_that_offers_to_save_is_asked_once_instead(tmp_path: Path) -> None:
    class Saves(Checkpoint):
        def __init__(self) -> None:
            self.saved: list[int] = []

        def save_now(self, trainer: Any) -> None:
            self.saved.append(Progress.of(trainer).steps)

    saves = Saves()
    trainer_that_stops(tmp_path, saves, enable_checkpointing=True).fit(Signals({3: [signal.SIGTERM]}), TinyData())
    assert saves.saved == [2]
    assert os.listdir(tmp_path) == []


def test_the_folder_may_be_given(tmp_path: Path) -> None:
    trainer = quiet_trainer(GracefulStop(str(tmp_path / "saved")), default_root_dir=tmp_path, max_steps=3)
    trainer.fit(Signals({0: [signal.SIGTERM]}), TinyData())
    assert os.listdir(tmp_path / "saved") == ["stopped-step=1.ckpt"]


def test_without_a_signal_nothing_is_saved_and_signal_is_none(tmp_path: Path) -> None:
    stop = GracefulStop()
    trainer = quiet_trainer(stop, default_root_dir=tmp_path, max_steps=3)
    trainer.fit(TinyModule(), TinyData())
    assert (trainer.global_step, stop.signal, os.listdir(tmp_path)) == (3, None, [])


@pytest.mark.parametrize("minimum", [{"min_steps": 4}, {"min_epochs": 3, "max_epochs": 5}], ids=str)
def test_a_minimum_of_steps_or_epochs_does_not_hold_the_stop(minimum: dict[str, int], tmp_path: Path) -> None:
    before: list[Any] = []
    note = Watch("on_train_batch_start", lambda t, *rest: before.append((t.min_steps, t.min_epochs)))
    trainer = quiet_trainer(GracefulStop(), note, default_root_dir=tmp_path, **{"max_steps": 8, **minimum})
    trainer.fit(Signals({0: [signal.SIGTERM]}), TinyData())
    assert trainer.global_step == 1
    assert os.listdir(tmp_path) == ["stopped-step=1.ckpt"]
    assert [(trainer.min_steps, trainer.min_epochs)] == before


def test_the_next_fit_validates_as_before(tmp_path: Path) -> None:
    trainer = quiet_trainer(GracefulStop(), default_root_dir=tmp_path, limit_val_batches=2)
    trainer.fit(module := Signals({0: [signal.SIGTERM]}), TinyData(validation_batches=3))
    assert module.validated_after == []
    assert trainer.limit_val_batches == 2


def test_a_second_fit_forgets_the_first_signal(tmp_path: Path) -> None:
    stop = GracefulStop()
    trainer = quiet_trainer(stop, default_root_dir=tmp_path, max_steps=3)
    module = Signals({0: [signal.SIGTERM]})
    trainer.fit(module, TinyData())
    assert stop.signal == signal.SIGTERM
    module.plan = {}
    train_more(trainer, 3)
    trainer.fit(module, TinyData())
    assert (trainer.global_step, stop.signal) == (4, None)


def test_handlers_are_restored_after_an_exception_and_the_next_fit_stops_as_ever(tmp_path: Path) -> None:
    class Fails(Signals):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            if self.plan == {}:
                raise RuntimeError("the step failed")
            return super().training_step(batch, batch_idx)

    before = [signal.getsignal(n) for n in SIGNALS]
    trainer = trainer_that_stops(tmp_path)
    module = Fails({})
    with pytest.raises(RuntimeError, match="the step failed"):
        trainer.fit(module, TinyData())
    assert [signal.getsignal(n) for n in SIGNALS] == before
    module.plan = {1: [signal.SIGTERM]}
    trainer.fit(module, TinyData())
    assert trainer.global_step == 1


def test_outside_the_main_thread_it_takes_no_handler(tmp_path: Path) -> None:
    steps: list[int] = []

    def fit() -> None:
        trainer = trainer_that_stops(tmp_path)
        trainer.fit(TinyModule(), TinyData())
        steps.append(trainer.global_step)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert steps == [5]


def test_lightnings_sigterm_broadcast_is_silent_during_the_fit_only() -> None:
    inside: list[bool] = []
    watch = Watch(
        "on_train_batch_start",
        lambda t, *rest: inside.append("_broadcast_sigterm_tensor" in vars(t.fit_loop.epoch_loop)),
    )
    trainer = quiet_trainer(GracefulStop(), watch, max_steps=2)
    trainer.fit(TinyModule(), TinyData())
    assert inside == [True, True]
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)


SCRIPT = """
import os, signal, sys
from lit_stable.callbacks import GracefulStop
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
stop = GracefulStop(sys.argv[1])
def kill(trainer, batch, index):
    if index == 2:
        os.kill(os.getpid(), int(sys.argv[2]))
kill = Watch("on_train_batch_start", kill)
quiet_trainer(kill, stop, max_steps=9).fit(TinyModule(), TinyData())
sys.exit(128 + stop.signal if stop.signal else 0)
"""


@either_signal
def test_a_process_can_exit_with_128_plus_the_signal(number: int, tmp_path: Path) -> None:
    (script := tmp_path / "stops.py").write_text(SCRIPT)
    (folder := tmp_path / "checkpoints").mkdir()
    Script(script, [str(folder), str(int(number))], dict(os.environ), tmp_path).said(code=128 + number)
    assert os.listdir(folder) == ["stopped-step=3.ckpt"]


NOTICE = signal.SIGUSR1


def test_a_signal_that_is_named_stops_as_sigterm_does_and_ends_nothing_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(NOTICE)
    trainer = quiet_trainer(stop := GracefulStop(also=["USR1"]), default_root_dir=tmp_path, max_steps=5)
    trainer.fit(Signals({2: [NOTICE]}), TinyData())
    assert (trainer.global_step, stop.signal, os.listdir(tmp_path)) == (3, NOTICE, ["stopped-step=3.ckpt"])
    assert signal.getsignal(NOTICE) == before


@pytest.mark.parametrize(("also", "code"), [(["SIGUSR1"], 138), ([], -NOTICE)], ids=["named", "not_named"])
def test_a_process_that_gets_notice_exits_with_128_plus_the_signal_if_it_is_named(
    also: list[str], code: int, tmp_path: Path
) -> None:
    (script := tmp_path / "stops.py").write_text(SCRIPT.replace("(sys.argv[1])", f"(sys.argv[1], also={also})"))
    (folder := tmp_path / "checkpoints").mkdir()
    Script(script, [str(folder), str(int(NOTICE))], dict(os.environ), tmp_path).said(code=code)
    assert os.listdir(folder) == (["stopped-step=3.ckpt"] if also else [])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SIGUSR9", "is no signal"),
        ("", "is no signal"),
        ("_SETMASK", "is no signal"),
        ("KILL", "can be heeded by no process"),
        ("SIGSTOP", "can be heeded by no process"),
        ("SIGCHLD", "gives notice of something else than the end of a job"),
    ],
)
def test_what_cannot_stop_a_run_is_refused(name: str, why: str) -> None:
    sentence = rf"^`GracefulStop\(also=\['{name}'\]\)`: '{name}' {why}; name one of SIGUSR1, .*\.$"
    with pytest.raises(MisconfigurationException, match=sentence):
        GracefulStop(also=[name])


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {"NTASKS": "1", "NTASKS_PER_NODE": "1", "JOB_ID": "1", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return SLURMEnvironment


def test_where_lightning_requeues_on_the_signal_that_is_said(slurm: Any, tmp_path: Path) -> None:
    for also in (["SIGUSR1"], ["USR1", "SIGHUP"]):
        with pytest.raises(MisconfigurationException, match=r"requeues the job on SIGUSR1; give .*auto_requeue=False"):
            quiet_trainer(GracefulStop(also=also), plugins=[slurm()]).fit(TinyModule(), TinyData())
    own = slurm(requeue_signal=signal.SIGUSR2), slurm(auto_requeue=False)
    for number, environment in enumerate(own, 1):
        stop, folder = GracefulStop(also=["SIGUSR1"]), tmp_path / str(number)
        trainer = quiet_trainer(stop, plugins=[environment], default_root_dir=folder)
        trainer.fit(Signals({0: [NOTICE]}), TinyData())
        assert (stop.signal, os.listdir(folder)) == (NOTICE, ["stopped-step=1.ckpt"])


def test_a_run_whose_steps_lightning_does_not_count_stops_after_the_batch(tmp_path: Path) -> None:
    def interrupt(trainer: Any, *rest: Any) -> None:
        if rest[-1] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    stop = GracefulStop()
    trainer = quiet_trainer(stop, Watch("on_train_batch_start", interrupt), default_root_dir=tmp_path, max_epochs=3)
    trainer.fit(Manual(raw=True), loader())
    assert (trainer.fit_loop.total_batch_idx, stop.signal) == (1, signal.SIGTERM)
    assert os.listdir(tmp_path) == ["stopped-step=0.ckpt"]
