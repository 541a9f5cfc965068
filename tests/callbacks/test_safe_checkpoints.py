from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, assert_same_bits, quiet_trainer, snapshot

from lit_stable.callbacks import Progress, SafeCheckpoints, checkpoint_files
from lit_stable.callbacks.safe_checkpoints import FORMAT, KEY


def saved(folder: Path, steps: int = 2, name: str = "a.ckpt", **module: Any) -> Path:
    trainer = quiet_trainer(
        SafeCheckpoints(),
        Progress(),
        ModelCheckpoint(folder, filename=name.removesuffix(".ckpt")),
        max_steps=steps,
        enable_checkpointing=True,
    )
    trainer.fit(TinyModule(**module), TinyData())
    return folder / name


def resume(path: Path, **module: Any) -> Any:
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=4)
    trainer.fit(TinyModule(**module), TinyData(), ckpt_path=path)
    return trainer


def test_a_save_is_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert checkpoint_files.damage(path) is None
    assert torch.load(path, weights_only=True)[KEY] == {"format": FORMAT, "optimizer_steps": [2]}


def test_what_a_kill_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt.partial").mkdir()
    (tmp_path / "a.ckpt.partial" / "shard").touch()
    saved(tmp_path)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_save_that_fails_leaves_the_previous_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    trainer = quiet_trainer(SafeCheckpoints(), SaveAtSteps(tmp_path), max_steps=1)

    def half(checkpoint: Any, path: Path, storage_options: Any = None) -> None:
        path.write_bytes(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer.strategy.checkpoint_io, "save_checkpoint", half)
    path.rename(tmp_path / "start.ckpt")
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(TinyModule(), TinyData())
    assert (tmp_path / "start.ckpt").read_bytes() == before


def test_saving_after_every_micro_batch_changes_nothing(tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], [SafeCheckpoints(), SaveAtSteps(tmp_path)]):
        trainer = quiet_trainer(*callbacks, max_steps=4, accumulate_grad_batches=2)
        trainer.fit(TinyModule(), TinyData(resumes=False))
        runs.append(snapshot(trainer))
    assert_same_bits(runs[1], runs[0])


@pytest.mark.parametrize("break_it", ["half", "bit", "empty"])
def test_a_damaged_checkpoint_is_named_with_the_newest_usable_one(break_it: str, tmp_path: Path) -> None:
    usable = saved(tmp_path, name="older.ckpt")
    path = saved(tmp_path, name="last.ckpt")
    content = bytearray(path.read_bytes())
    if break_it == "bit":
        content[bytes(content).index(b"exp_avg") + 2] ^= 1
    path.write_bytes({"half": content[: len(content) // 2], "bit": content, "empty": b""}[break_it])
    with pytest.raises(MisconfigurationException, match=rf"{path} is .*; resume from {usable}\.$"):
        resume(path)


def test_a_damaged_checkpoint_without_another_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(MisconfigurationException, match=rf"; no other usable checkpoint lies in {tmp_path}\.$"):
        resume(path)


def test_a_checkpoint_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"gone\.ckpt does not exist; no other"):
        resume(tmp_path / "gone.ckpt")


def test_a_publish_killed_between_its_renames_is_finished_by_the_load(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.rename(tmp_path / "a.ckpt.replaced")
    assert resume(path).global_step == 4
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    checkpoint = torch.load(path)
    checkpoint[KEY]["format"] = FORMAT + 1
    torch.save(checkpoint, path)
    with pytest.raises(
        MisconfigurationException, match=rf"has checkpoint format {FORMAT + 1}, .* up to {FORMAT}; upgrade"
    ):
        resume(path)


def test_a_checkpoint_written_without_it_loads(tmp_path: Path) -> None:
    trainer = quiet_trainer(Progress(), max_steps=2)
    trainer.fit(TinyModule(), TinyData())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert resume(tmp_path / "a.ckpt").global_step == 4


def test_gradients_are_gone_before_a_load(tmp_path: Path) -> None:
    path = saved(tmp_path)
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=4)
    module = TinyModule()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    alive: list[bool] = []
    real = trainer.strategy.load_checkpoint

    def look(*args: Any, **kwargs: Any) -> Any:
        alive.append(any(p.grad is not None for p in module.parameters()))
        return real(*args, **kwargs)

    trainer.strategy.load_checkpoint = look
    trainer.fit(module, TinyData(), ckpt_path=path)
    assert alive == [False]


def test_optimizer_state_that_was_not_restored_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    checkpoint = torch.load(path)
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state["step"].zero_()
    torch.save(checkpoint, path)
    with pytest.raises(MisconfigurationException, match=r"optimizer 0: .* is 0 and the checkpoint says 2"):
        resume(path)


def test_optimizers_without_step_counts_resume(tmp_path: Path) -> None:
    sgd = {"make_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}
    path = saved(tmp_path, **sgd)
    assert torch.load(path)[KEY]["optimizer_steps"] == [None]
    assert resume(path, **sgd).global_step == 4


def test_paths_with_a_scheme_are_left_to_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    written: list[str] = []
    trainer = quiet_trainer(SafeCheckpoints(), max_steps=3)
    io = trainer.strategy.checkpoint_io
    monkeypatch.setattr(io, "save_checkpoint", lambda checkpoint, path, **rest: written.append(str(path)))
    monkeypatch.setattr(io, "load_checkpoint", lambda *args, **rest: torch.load(path, weights_only=True))
    callback = trainer.callbacks[0]
    callback.setup(trainer, None, "fit")  # type: ignore[arg-type]
    trainer.strategy.save_checkpoint({}, "s3://bucket/a.ckpt")
    assert written == ["s3://bucket/a.ckpt"]
    assert trainer.strategy.load_checkpoint("s3://bucket/a.ckpt")["global_step"] == 2
    callback.teardown(trainer, None, "fit")  # type: ignore[arg-type]


def test_the_strategys_own_methods_are_back_after_the_fit() -> None:
    trainer = quiet_trainer(SafeCheckpoints(), max_steps=1)
    trainer.fit(TinyModule(), TinyData())
    assert not {"save_checkpoint", "load_checkpoint"} & vars(trainer.strategy).keys()


def test_it_guards_the_next_trainer_too_after_a_fit_that_failed(tmp_path: Path) -> None:
    def fail(*rest: Any) -> None:
        raise RuntimeError("the step failed")

    callback = SafeCheckpoints()
    failing = quiet_trainer(callback, Watch("on_train_batch_start", fail))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the step failed"):
            failing.fit(TinyModule(), TinyData(resumes=False))
    trainer = quiet_trainer(callback, SaveAtSteps(tmp_path), max_steps=1)
    asked: list[str] = []
    real = trainer.strategy.checkpoint_io.save_checkpoint

    def save(checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        asked.append(Path(path).name)
        real(checkpoint, path, storage_options=storage_options)

    trainer.strategy.checkpoint_io.save_checkpoint = save  # type: ignore[method-assign]
    trainer.fit(TinyModule(), TinyData(resumes=False))
    assert asked == ["start.ckpt.partial", "micro-1.ckpt.partial"]


def test_an_evaluation_of_a_checkpoint_leaves_no_trace_in_the_fit_that_follows(tmp_path: Path) -> None:
    path = saved(tmp_path)
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=2)
    module = TinyModule()
    trainer.validate(module, TinyData(validation_batches=1), ckpt_path=path, verbose=False)
    trainer.fit(module, TinyData())
    assert Progress.of(trainer).steps == 2
