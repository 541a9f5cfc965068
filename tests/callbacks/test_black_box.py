"""The last steps are written down when something happens, with their samples, and equal what the run computed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import WithholdsSteps, loader
from lightning.pytorch.plugins import MixedPrecision
from no_sync import NoSync
from tiny_fit import TinyData, TinyModule, Turns, Watch, adamw, quiet_trainer
from tiny_gpt_run import fit, sample
from torch.utils._python_dispatch import TorchDispatchMode

from lit_stable.callbacks import BlackBox, Event, Events, GradSpikeSkip, ScriptedSkip, StepSeed, emit
from lit_stable.callbacks.base import Callback, MisconfigurationException
from lit_stable.callbacks.black_box_row import DeviceRing


class Tells(Callback):
    """Tells of an event at the end of given steps."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.steps = folder, steps

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        Events.of(trainer).folder = self.folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step in self.steps and not trainer.fit_loop.epoch_loop._should_accumulate():
            emit(trainer, Event(trainer.global_step, "alarm", {"step": trainer.global_step}))


def dumps(folder: Path) -> dict[str, Any]:
    return {p.parent.name: json.loads(p.read_text()) for p in sorted(folder.glob("blackbox/*/rank0.json"))}


@pytest.mark.filterwarnings("ignore")
def test_a_record_holds_what_the_steps_computed_and_read(tmp_path: Path) -> None:
    run = fit(steps=5, callbacks=(Tells(tmp_path, 4), BlackBox(steps=3, text_steps=2)))
    (found,) = dumps(tmp_path).values()
    assert found["event"] == {"step": 4, "kind": "alarm", "evidence": {"step": 4}}
    assert [row["step"] for row in found["steps"]] == [2, 3, 4]
    for row, (step, loss, lr, norm) in zip(found["steps"], run.rows[1:4], strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert (row["step"], row["lr"], row["grad_norm"]) == (step, lr, norm)
        layers = [value for name, value in row.items() if name.startswith("grad_norm/")]
        assert math.hypot(*layers) == pytest.approx(norm, rel=1e-5)
        assert row["samples"] == list(range(8 * (step - 1), 8 * step))
        assert len(set(row["seeds"])) == 4
        assert row["clip_level"] == 0.5
    text = (tmp_path / "blackbox" / "step-00000004-alarm" / "rank0.txt").read_text()
    assert text.startswith(f"=== step 4, sample 24\n{sample(24)[:-1].tolist()}\n")
    assert text.count("===") == 16


@pytest.mark.filterwarnings("ignore")
def test_a_kind_is_written_once_in_so_many_steps_and_old_folders_go(tmp_path: Path) -> None:
    fit(steps=8, callbacks=(Tells(tmp_path, 1, 2, 3, 4, 5, 8), BlackBox(steps=3, text_steps=0, keep=2)))
    assert list(dumps(tmp_path)) == ["step-00000004-alarm", "step-00000008-alarm"]
    assert not list(tmp_path.glob("blackbox/*/*.txt"))
    fit(steps=2, callbacks=(Tells(tmp_path / "none", 1), BlackBox(kinds="spike not_*")))
    assert not dumps(tmp_path / "none")


@pytest.mark.filterwarnings("ignore")
def test_the_oldest_by_time_go_and_what_was_just_written_stays(tmp_path: Path) -> None:
    """As behind a rewind, where steps begin anew: by their steps, the newest record of all was deleted at once."""
    for age, step in enumerate((900, 700, 800)):
        (old := tmp_path / "blackbox" / f"step-{step:08d}-spike").mkdir(parents=True)
        os.utime(old, (1e9 - age, 1e9 - age))
    fit(steps=2, callbacks=(Tells(tmp_path, 2), BlackBox(text_steps=0, keep=3)))
    left = sorted(path.name for path in (tmp_path / "blackbox").iterdir())
    assert left == ["step-00000002-alarm", "step-00000700-spike", "step-00000900-spike"]


@pytest.mark.filterwarnings("ignore")
def test_what_was_written_over_is_as_new_as_its_files(tmp_path: Path) -> None:
    for age, step in enumerate((900, 3)):
        (old := tmp_path / "blackbox" / f"step-{step:08d}-alarm").mkdir(parents=True)
        (old / "rank0.json").touch()
        os.utime(old / "rank0.json", (1e9 - age, 1e9 - age))
        os.utime(old, (1e9 - age, 1e9 - age))
    fit(steps=5, callbacks=(Tells(tmp_path, 3, 5), BlackBox(steps=2, text_steps=0, keep=2)))
    left = sorted(path.name for path in (tmp_path / "blackbox").iterdir())
    assert left == ["step-00000003-alarm", "step-00000005-alarm"]


@pytest.mark.filterwarnings("ignore")
def test_of_equal_times_the_lowest_steps_go_and_what_was_just_written_stays(tmp_path: Path) -> None:
    for step in (900, 700, 800):
        (old := tmp_path / "blackbox" / f"step-{step:08d}-spike").mkdir(parents=True)
        os.utime(old, (4e9, 4e9))  # also ahead of the record that is written, as after a clock was set back
    fit(steps=2, callbacks=(Tells(tmp_path, 2), BlackBox(text_steps=0, keep=2)))
    left = sorted(path.name for path in (tmp_path / "blackbox").iterdir())
    assert left == ["step-00000002-alarm", "step-00000900-spike"]


@pytest.mark.filterwarnings("ignore")
def test_an_exception_leaves_the_step_that_failed(tmp_path: Path) -> None:
    class Fails(TinyModule):
        asked = 0

        def token_ids(self, batch: Any) -> None:
            self.asked += 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 3:
                raise ArithmeticError("boom")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(BlackBox(), StepSeed(1), default_root_dir=tmp_path)
    with pytest.raises(ArithmeticError):
        trainer.fit(module := Fails(), TinyData())
    (found,) = dumps(tmp_path).values()
    assert found["event"]["evidence"] == {"error": "ArithmeticError", "text": "boom"}
    assert [(row["step"], row["samples"]) for row in found["steps"]][-2:] == [(3, [4, 5]), (4, [6, 7])]
    assert module.asked == 1, "what has no text is not asked for it again"


@pytest.mark.filterwarnings("ignore")
def test_thresholds_of_a_skip_and_numbers_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    trainer = quiet_trainer(Tells(tmp_path, 3), BlackBox(), GradSpikeSkip(5.0), default_root_dir=tmp_path)
    trainer.fit(TinyModule(poison={2: math.nan}), TinyData())
    rows = dumps(tmp_path)["step-00000003-alarm"]["steps"]
    assert [row["skipped"] for row in rows] == [0.0, 0.0, 1.0]
    assert [row["spike_limit"] for row in rows] == [5.0, 5.0, 5.0]
    assert (rows[2]["loss"], rows[2]["grad_norm"]) == ("nan", "nan")


def skipped(folder: Path) -> dict[int, Any]:
    """Of the last record: whether each of its steps was skipped."""
    return {row["step"]: row.get("skipped") for row in list(dumps(folder).values())[-1]["steps"]}


both_kernels = pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])


@both_kernels
@pytest.mark.filterwarnings("ignore")
def test_a_skip_is_told_whoever_skips(fused: bool, tmp_path: Path) -> None:
    skips = GradSpikeSkip(5.0), ScriptedSkip([2])
    trainer = quiet_trainer(Tells(tmp_path, 4), BlackBox(), *skips, default_root_dir=tmp_path)
    trainer.fit(TinyModule(adamw(fused=fused), poison={2: math.nan}), TinyData())
    assert skipped(tmp_path) == {1: 0.0, 2: 1.0, 3: 1.0, 4: 0.0}


@both_kernels
@pytest.mark.filterwarnings("ignore")
def test_a_step_that_a_gradient_scaler_leaves_out_is_skipped(fused: bool, tmp_path: Path) -> None:
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))
    trainer = quiet_trainer(Tells(tmp_path, 3), BlackBox(), plugins=[scaler], default_root_dir=tmp_path)
    trainer.fit(TinyModule(adamw(fused=fused), poison={1: math.inf}), TinyData())
    assert skipped(tmp_path) == {1: 0.0, 2: 1.0, 3: 0.0}


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_the_module_withholds_is_skipped_and_has_its_own_numbers_alone(tmp_path: Path) -> None:
    losses: list[float] = []
    watch = Watch("on_train_batch_end", lambda trainer, outputs, *rest: losses.append(float(outputs["loss"])))
    trainer = quiet_trainer(watch, Tells(tmp_path, 6), BlackBox(steps=2), max_steps=6, default_root_dir=tmp_path)
    trainer.fit(WithholdsSteps(), loader())
    (found,) = dumps(tmp_path).values()
    withheld, taken = found["steps"]
    assert (withheld["skipped"], taken["skipped"]) == (1.0, 0.0)
    assert not {"loss", "grad_norm"} & withheld.keys(), "step 3 has left them in its place"
    assert taken["loss"] == losses[5]


@pytest.mark.parametrize("where", ["before", "within", "behind"])
@pytest.mark.filterwarnings("ignore")
def test_of_a_step_that_failed_is_told_what_is_known(where: str, tmp_path: Path) -> None:
    class Fails(Callback):
        def fail(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == (4 if where == "behind" else 3):
                raise ArithmeticError("boom")

    hooks = {"before": "on_before_backward", "within": "on_before_optimizer_step", "behind": "on_train_batch_end"}
    fails = Fails()
    setattr(fails, hooks[where], fails.fail)
    trainer = quiet_trainer(fails, BlackBox(steps=2), ScriptedSkip([3, 4]), default_root_dir=tmp_path)
    with pytest.raises(ArithmeticError):
        trainer.fit(TinyModule(), TinyData())
    rows = list(dumps(tmp_path).values())[-1]["steps"]
    assert [(row["step"], row.get("skipped")) for row in rows] == [(3, 1.0), (4, 1.0 if where == "behind" else None)]


class NoReads(TorchDispatchMode):
    """Reading a number of a tensor on the host raises: on a GPU it would wait."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")
def test_nothing_of_a_step_is_read_on_the_host(tmp_path: Path) -> None:
    class Watched(BlackBox):
        def on_before_optimizer_step(self, *args: Any) -> None:
            with NoReads():
                super().on_before_optimizer_step(*args)

        def on_train_batch_end(self, *args: Any) -> None:
            with NoReads():
                super().on_train_batch_end(*args)

    box = Watched()
    trainer = quiet_trainer(box, GradSpikeSkip(5.0), ScriptedSkip([2]), default_root_dir=tmp_path, max_steps=6)
    trainer.fit(TinyModule(poison={2: math.nan}), TinyData())
    assert trainer.global_step == 6


def test_a_ring_keeps_what_it_has_when_a_number_comes_to_it() -> None:
    ring, layers = DeviceRing(2), (["grad_norm/a"], torch.ones(1))
    ring.put(1, "loss", torch.tensor(2.0))
    ring.write(2, {"loss": 3.0, "clip_level": 0.5}, layers)
    ring.put(2, "skipped", torch.tensor(True))
    assert ring.read(1) == {"loss": 2.0}
    assert ring.read(2) == {"loss": 3.0, "clip_level": 0.5, "grad_norm/a": 1.0, "skipped": 1.0}
    ring.write(3, {"loss": 4.0, "clip_level": 0.25}, layers)
    assert ring.read(1) == {}
    assert "skipped" not in ring.read(3)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "blackbox").write_text("in the way")
    trainer = quiet_trainer(BlackBox(), Tells(tmp_path, 1), default_root_dir=tmp_path)
    trainer.fit(TinyModule(), TinyData())
    assert trainer.global_step == 4


@pytest.mark.gpu
def test_no_step_waits_for_the_device() -> None:
    own = BlackBox(), GradSpikeSkip(5.0), ScriptedSkip([5])
    trainer = quiet_trainer(*own, NoSync(), accelerator="gpu", max_steps=12, log_every_n_steps=100)
    trainer.fit(TinyModule(poison={6: math.nan}), TinyData())
    assert torch.isfinite(trainer.lightning_module.net[0].weight).all()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"keep": 0}, {"text_steps": -1}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(MisconfigurationException, match="BlackBox"):
        BlackBox(**wrong)


def test_of_optimizers_that_take_turns_each_is_on_record(tmp_path: Path) -> None:
    module = Turns()
    module.first = 1
    quiet_trainer(Tells(tmp_path, 4), BlackBox(steps=4), max_steps=4).fit(module, TinyData())
    (found,) = dumps(tmp_path).values()
    for row in found["steps"]:
        layers = [name for name in row if name.startswith("grad_norm/")]
        assert layers == ["grad_norm/net.3" if row["step"] % 2 else "grad_norm/net.0"]
        assert row["grad_norm"] == pytest.approx(row[layers[0]], rel=1e-6)
        assert {"loss", "skipped"} <= row.keys()
