"""The last steps are written down when something happens, with their samples, and equal what the run computed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from no_sync import NoSync
from tiny_fit import TinyData, TinyModule, quiet_trainer
from tiny_gpt_run import fit, sample

from lit_stable.callbacks import BlackBox, Event, Events, GradSpikeSkip, StepSeed, emit
from lit_stable.callbacks.base import Callback, MisconfigurationException


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


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "blackbox").write_text("in the way")
    trainer = quiet_trainer(BlackBox(), Tells(tmp_path, 1), default_root_dir=tmp_path)
    trainer.fit(TinyModule(), TinyData())
    assert trainer.global_step == 4


@pytest.mark.gpu
def test_no_step_waits_for_the_device() -> None:
    trainer = quiet_trainer(BlackBox(), NoSync(), accelerator="gpu", max_steps=12, log_every_n_steps=100)
    trainer.fit(TinyModule(), TinyData())
    assert torch.isfinite(trainer.lightning_module.net[0].weight).all()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"keep": 0}, {"text_steps": -1}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(MisconfigurationException, match="BlackBox"):
        BlackBox(**wrong)
