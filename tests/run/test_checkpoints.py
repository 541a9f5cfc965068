"""When a checkpoint is written and which ones stay, in fits of a linear layer."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from tiny_fit import TinyData, TinyModule, quiet_trainer

from lit_stable.callbacks import (
    AccumulationWindows,
    LROverride,
    Progress,
    RunControl,
    SafeCheckpoints,
    ValidateEverySteps,
)
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.control_orders import new_order, place
from lit_stable.run.checkpoints import Checkpoints
from lit_stable.run.mirror import PlainFolder


class Scores(Callback):
    """Makes the validation loss of each step what a test says, and records which checkpoints exist after each step."""

    def __init__(self, folder: Path, losses: dict[int, float]) -> None:
        self.folder, self.losses, self.saved = folder, losses, {}

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.log("val/loss", torch.tensor(self.losses.get(Progress.of(trainer).steps, 9.0)))

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.saved[Progress.of(trainer).steps] = self.on_disk()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.saved[Progress.of(trainer).steps] = self.on_disk()

    def on_disk(self) -> list[int]:
        return sorted(int(path.stem.split("-")[1]) for path in (self.folder / "checkpoints").glob("*.ckpt"))


def fit(
    folder: Path,
    checkpoints: Checkpoints,
    steps: int,
    losses: dict[int, float] | None = None,
    window: int = 1,
    ckpt_path: Path | None = None,
    callback: Callback | None = None,
    **options: Any,
) -> dict[int, list[int]]:
    """Train, validating every second step if there are ``losses``; the steps saved on disk after each step."""
    checkpoints.folder = folder
    scores = Scores(folder, losses or {})
    own = [
        Progress(),
        AccumulationWindows(2 * window, 2),
        SafeCheckpoints(checkpoints.in_background),
        ValidateEverySteps(2),
        scores,
    ]
    own += [] if callback is None else [callback]
    options = {"enable_checkpointing": True, "check_val_every_n_epoch": None, **options}
    options["limit_val_batches"] = 1 if losses else 0
    trainer = quiet_trainer(*own, checkpoints, max_steps=steps, **options)
    trainer.fit(TinyModule(), datamodule=TinyData(validation_batches=1), ckpt_path=ckpt_path)
    return scores.saved


def test_saved_early_then_every_so_often_then_at_the_end(tmp_path):
    saved = fit(tmp_path, Checkpoints(every_steps=4, first_step=2, keep_last=9), steps=9)
    assert saved[1] == []
    assert saved[2] == saved[3] == [2]
    assert saved[9] == [2, 4, 8, 9]


def test_without_a_first_step_the_interval_decides(tmp_path):
    assert fit(tmp_path, Checkpoints(every_steps=2, first_step=None, keep_last=9), steps=5)[5] == [2, 4, 5]


def test_in_samples_the_step_that_comes_over_a_multiple_is_saved_also_after_a_resume(tmp_path):
    # 4 samples a step: 6 within step 2, 12 at the end of 3, 18 within 5, 24 at the end of 6.
    options = {"every_steps": "6 samples", "first_step": None, "keep_last": 9}
    assert fit(tmp_path, Checkpoints(**options), steps=3, window=2)[3] == [2, 3]
    resume = tmp_path / "checkpoints" / "step-00000003.ckpt"
    assert fit(tmp_path, Checkpoints(**options), steps=7, window=2, ckpt_path=resume)[7] == [2, 3, 5, 6, 7]


def test_a_window_of_micro_batches_is_saved_once(tmp_path):
    saved = fit(tmp_path, Checkpoints(every_steps=1, first_step=None, keep_last=9), steps=3, window=3)
    assert saved == {0: [], 1: [1], 2: [1, 2], 3: [1, 2, 3]}


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [5, 6])])
def test_the_newest_stay(tmp_path, keep, left):
    assert fit(tmp_path, Checkpoints(every_steps=1, keep_last=keep), steps=6)[6] == left


def test_the_best_stays_as_well(tmp_path):
    losses = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5}
    checkpoints = Checkpoints(every_steps=3, first_step=None)
    saved = fit(tmp_path, checkpoints, steps=8, losses=losses)
    assert saved[2] == [2]  # validated, and better than nothing
    assert saved[4] == [4]  # better: the one at 3 and the old best are gone
    assert saved[8] == [4, 8]
    assert (checkpoints.best(), checkpoints.last()) == (
        tmp_path / "checkpoints" / "step-00000004.ckpt",
        tmp_path / "checkpoints" / "step-00000008.ckpt",
    )


def test_the_best_is_not_kept_on_request(tmp_path):
    saved = fit(tmp_path, Checkpoints(every_steps=3, keep_best=False), steps=8, losses={2: 1.0})
    assert saved[8] == [8]
    assert saved[2] == []


@pytest.mark.parametrize("name", ["best.json", "milestones.json"])
@pytest.mark.parametrize("text", ["", "[1]", '{"step": 2}', "xx"])
def test_where_nobody_can_read_what_is_to_be_kept_all_is_kept(tmp_path, name, text):
    if name == "milestones.json" and text == '{"step": 2}':
        text = '{"step"}'
    fit(tmp_path, Checkpoints(every_steps=1, first_step=None, keep_last=2), steps=3)
    path = tmp_path / "checkpoints" / name
    path.write_text(text)
    for steps in (6, 8):  # for ever: the session after the next deletes them no more than the next one
        resume = sorted((tmp_path / "checkpoints").glob("*.ckpt"))[-1]
        options = Checkpoints(every_steps=1, first_step=None, keep_last=1)
        if steps == 6:
            with pytest.warns(UserWarning, match=rf"{name}: cannot be read \(.*\) and says which checkpoints to keep"):
                saved = fit(tmp_path, options, steps, ckpt_path=resume)
        else:
            saved = fit(tmp_path, options, steps, ckpt_path=resume)
        assert saved[steps] == [2, 3, steps]
    assert path.with_name(f"{name}.unreadable").read_text() == text


def test_a_loss_that_is_not_a_number_is_never_the_best(tmp_path):
    checkpoints = Checkpoints(every_steps=1)
    fit(tmp_path, checkpoints, steps=6, losses={2: 5.0, 4: float("nan"), 6: 6.0})
    assert (checkpoints.best_step, checkpoints.best_loss) == (2, 5.0)


def test_a_resume_knows_the_best_even_if_it_was_saved_before_it_was_validated(tmp_path):
    fit(tmp_path, Checkpoints(every_steps=2, first_step=None), steps=4, losses={2: 5.0, 4: 3.0})
    again = Checkpoints(every_steps=2)
    last = tmp_path / "checkpoints" / "step-00000004.ckpt"
    saved = fit(tmp_path, again, steps=8, losses={6: 4.0, 8: 4.5}, ckpt_path=last)
    assert (again.best_step, again.best_loss) == (4, 3.0)
    assert saved[8] == [4, 8]


def test_a_new_folder_has_a_best_of_its_own(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    fit(first, Checkpoints(every_steps=2), steps=2, losses={2: 1.0})
    again = Checkpoints(every_steps=2)
    fit(second, again, steps=4, losses={4: 2.0}, ckpt_path=first / "checkpoints" / "step-00000002.ckpt")
    assert again.best() == second / "checkpoints" / "step-00000004.ckpt"
    assert json.loads((second / "checkpoints" / "best.json").read_text()) == {"step": 4, "loss": 2.0}


def test_the_sanity_check_before_training_is_no_validation(tmp_path):
    checkpoints = Checkpoints(every_steps=9)
    saved = fit(tmp_path, checkpoints, steps=1, losses={0: 0.1, 1: 4.0}, num_sanity_val_steps=1)
    assert saved[0] == []
    assert checkpoints.best_step == 1


def test_saving_a_step_again_writes_nothing(tmp_path, capsys):
    class Twice(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            checkpoints.save_now(trainer)
            checkpoints.save_now(trainer)

    checkpoints = Checkpoints(keep_last=9)
    checkpoints.folder = tmp_path
    trainer = quiet_trainer(Progress(), Twice(), checkpoints, max_steps=2, enable_checkpointing=True)
    trainer.fit(TinyModule(), datamodule=TinyData())
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in said] == [
        f"saved {tmp_path / 'checkpoints' / f'step-0000000{step}.ckpt'}" for step in (1, 2)
    ]
    assert all(re.search(r"\(\S+ \w+, training stood still for \d+\.\d\d s\)$", line) for line in said)
    assert len(checkpoints.stalls) == 2
    assert min(checkpoints.stalls) > 0


@pytest.mark.parametrize("every", [1, 3])
def test_in_the_background_the_same_ones_stay(tmp_path, capsys, every):
    left = {}
    for in_background in (False, True):
        folder = tmp_path / str(in_background)
        losses = {2: 5.0, 4: 3.0, 6: 4.0}
        options = Checkpoints(every_steps=every, first_step=None, keep_last=2, in_background=in_background)
        fit(folder, options, 8, losses)
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        left[in_background] = names, options.best().name, len(options.stalls)
    assert left[True] == left[False]
    lines = capsys.readouterr().out
    for name in (name for name in names if name.endswith(".ckpt")):
        assert len(re.findall(rf"saved \S+True/checkpoints/{name} \(", lines)) == 1


def test_the_older_best_stays_until_the_new_one_is_on_disk(tmp_path):
    """Killed in mid-write, a run had no best: the old one was deleted, and `best.json` named one that was not there."""
    checkpoints = Checkpoints(every_steps=3, first_step=None, in_background=True)
    may_write, seen = threading.Event(), []

    class SlowDisk(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            assert checkpoint["global_step"] != 4 or may_write.wait(60)
            super().save_checkpoint(checkpoint, path, storage_options)

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if Progress.of(trainer).steps == 4:
                named = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
                seen.append((sorted(p.name for p in (tmp_path / "checkpoints").glob("*.ckpt")), named["step"]))
                may_write.set()

    # The save of step 3 is concluded by that of step 4.
    fit(tmp_path, checkpoints, 5, {2: 5.0, 4: 3.0}, callback=Look(), plugins=[SlowDisk()])
    assert seen == [(["step-00000002.ckpt", "step-00000003.ckpt"], 2)]
    assert [p.name for p in (tmp_path / "checkpoints").glob("*.ckpt")] == ["step-00000004.ckpt", "step-00000005.ckpt"]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {"step": 4, "loss": 3.0}


def test_a_write_under_way_when_training_fails_is_told_of(tmp_path, capsys):
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if Progress.of(trainer).steps == 2:
                raise ValueError("of training")

    checkpoints = Checkpoints(every_steps=2, first_step=None, in_background=True)
    with pytest.raises(ValueError, match="of training"):
        fit(tmp_path, checkpoints, 4, callback=Fails())
    assert "saved" in capsys.readouterr().out


def test_there_is_no_last_or_best_before_the_first_save(tmp_path):
    checkpoints = Checkpoints()
    assert (checkpoints.last(), checkpoints.best()) == (None, None)
    checkpoints.folder = tmp_path
    assert (checkpoints.last(), checkpoints.best()) == (None, None)


@pytest.mark.parametrize("name", ["every_steps", "first_step", "keep_last"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(MisconfigurationException, match=rf"checkpoints.{name}=0: must be at least 1\."):
        Checkpoints(**{name: 0})


def test_every_nth_and_milestones_stay_for_ever(tmp_path):
    options = {"every_steps": 3, "first_step": None, "keep_best": False, "keep_every": 4, "milestones": True}
    override = LROverride(start=6, factor=0.5)
    saved = fit(tmp_path, Checkpoints(**options), steps=10, callback=override)
    assert saved[10] == [4, 6, 8, 10]
    assert json.loads((tmp_path / "checkpoints" / "milestones.json").read_text()) == {"6": "before LROverride"}
    resumed = fit(
        tmp_path,
        Checkpoints(**options),
        steps=13,
        callback=LROverride(start=6, factor=0.5),
        ckpt_path=tmp_path / "checkpoints" / "step-00000010.ckpt",
    )
    assert resumed[13] == [4, 6, 8, 12, 13]


def test_an_order_that_changes_the_rate_keeps_what_was_before_it(tmp_path):
    place(tmp_path, new_order("lr*=0.5"))
    control = RunControl(folder=str(tmp_path))
    options = {"every_steps": 3, "first_step": None, "keep_best": False}
    with pytest.warns(UserWarning, match="control"):
        saved = fit(tmp_path, Checkpoints(**options, milestones=True), steps=7, callback=control)
    assert saved[7] == [1, 7]
    stored = torch.load(tmp_path / "checkpoints" / "step-00000001.ckpt", weights_only=True)
    assert stored["callbacks"]["RunControl"] == {"changes": {}}


def test_with_a_mirror_nothing_goes_before_its_copy_is_there(tmp_path, monkeypatch):
    run, mirror = tmp_path / "runs" / "name" / "0001", tmp_path / "mirror"
    run.mkdir(parents=True)
    options = {"every_steps": 2, "first_step": None, "keep_best": False, "mirror": str(mirror)}
    fit(run, Checkpoints(**options), steps=6)
    copies = mirror / "name" / "0001"
    assert sorted(p.name for p in copies.iterdir()) == [f"step-0000000{n}.ckpt" for n in (2, 4, 6)]
    assert [p.name for p in (run / "checkpoints").glob("*.ckpt")] == ["step-00000006.ckpt"]
    monkeypatch.setattr(PlainFolder, "put", lambda *_: (0, 0))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.warns(UserWarning, match="instead of"):
        fit(run, Checkpoints(**options), steps=10, ckpt_path=run / "checkpoints" / "step-00000006.ckpt")
    assert sorted(p.name for p in (run / "checkpoints").glob("*.ckpt")) == [f"step-{n:08d}.ckpt" for n in (8, 10)], (
        "6 has a copy, the others have none"
    )
