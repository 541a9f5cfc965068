from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import files_of_at_most
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, assert_same_bits, quiet_trainer, snapshot
from tiny_gpt_run import whole_weights
from torch.distributed.fsdp import fully_shard

from lit_stable.callbacks import Progress, SafeCheckpoints, checkpoint_files
from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.callbacks.safe_checkpoints import FORMAT, KEY
from lit_stable.strategies.fsdp2 import register_strategies


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
    names = ["net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"]
    recorded = {"format": FORMAT, "optimizer_steps": [2], "parameters": [[names]]}
    assert torch.load(path, weights_only=True)[KEY] == recorded


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
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.strategy.checkpoint_io, "save_checkpoint", half)
    path.rename(tmp_path / "start.ckpt")
    with pytest.raises(CheckpointError, match=r"start.ckpt: could not be written \(No space left on device; "):
        trainer.fit(TinyModule(), TinyData())
    assert (tmp_path / "start.ckpt").read_bytes() == before
    assert os.listdir(tmp_path) == ["start.ckpt"]  # the half that was written takes up no room


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


def test_a_path_may_begin_with_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save = Watch("on_train_end", lambda trainer, *rest: trainer.save_checkpoint("~/of it/a.ckpt"))
    quiet_trainer(SafeCheckpoints(), Progress(), save, max_steps=2).fit(TinyModule(), TinyData())
    assert (tmp_path / "of it" / "a.ckpt").is_file()
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=3)
    trainer.fit(TinyModule(), TinyData(), ckpt_path="~/of it/a.ckpt")
    assert trainer.global_step == 3


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


def test_a_plugin_that_saves_in_the_background_is_refused() -> None:
    trainer = quiet_trainer(SafeCheckpoints(), plugins=[AsyncCheckpointIO()])
    with pytest.raises(MisconfigurationException, match=r"`AsyncCheckpointIO`: .*in_background=True, or delete"):
        trainer.fit(TinyModule(), TinyData())


# -- another model, or another order of its parameters ---------------------------------------------------------------


class Grouped(TinyModule):
    """Weights and biases in groups of two rates; both their order and that within them can be turned round."""

    def __init__(self, groups_reversed: bool = False, members_reversed: bool = False) -> None:
        super().__init__()
        self.groups_step, self.members_step = -1 if groups_reversed else 1, -1 if members_reversed else 1
        self.net[3] = torch.nn.Linear(8, 8)  # as large as nothing else ...
        self.net.insert(4, torch.nn.Linear(8, 8))  # ... but this
        self.net.append(torch.nn.Linear(8, 4))
        with torch.no_grad():
            for number, parameter in enumerate(self.net.parameters()):
                parameter.copy_(torch.linspace(-0.4, 0.5 + 0.01 * number, parameter.numel()).view_as(parameter))

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim == 2][:: self.members_step]
        biases = [p for p in self.parameters() if p.ndim == 1][:: self.members_step]
        groups = [{"params": weights, "lr": 0.05}, {"params": biases, "lr": 0.01}][:: self.groups_step]
        optimizer = torch.optim.AdamW(groups, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)]


class ShardedGrouped(Grouped):
    def configure_model(self) -> None:
        if not hasattr(self.net[0].weight, "full_tensor"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def fit_grouped(strategy: str, *callbacks: Any, resume: Path | None = None, **order: bool) -> dict[str, torch.Tensor]:
    register_strategies()
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), *callbacks, max_steps=4, strategy=strategy)
    module = (Grouped if strategy == "auto" else ShardedGrouped)(**order)
    trainer.fit(module, TinyData(), ckpt_path=resume)
    return whole_weights(module)


@pytest.mark.parametrize("strategy", ["auto", "fsdp2", "fsdp2_full"])
def test_parameters_in_another_order_get_their_own_moments_and_moved_groups_are_refused(
    strategy: str, tmp_path: Path
) -> None:
    straight = fit_grouped(strategy, SaveAtSteps(tmp_path))
    resumed = fit_grouped(strategy, resume=tmp_path / "micro-2.ckpt", members_reversed=True)
    assert_same_bits(resumed, straight)
    told = r"micro-2.ckpt: net.0.bias stands in group 1 of its optimizer and in group 0 today, and would get another's"
    with pytest.raises(CheckpointError, match=told):
        fit_grouped(strategy, resume=tmp_path / "micro-2.ckpt", groups_reversed=True)


def test_names_are_saved_behind_a_validation_too_when_a_sharded_root_is_gathered_still(tmp_path: Path) -> None:
    class Validated(ShardedGrouped):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.net(batch)

    save = Watch("on_validation_end", lambda trainer: trainer.save_checkpoint(tmp_path / "validated.ckpt"))
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "strategy": "fsdp2"}
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), save, max_steps=2, **options)
    trainer.fit(Validated(), TinyData(validation_batches=1))
    (groups,) = torch.load(tmp_path / "validated.ckpt" / "meta.pt")[KEY]["parameters"]
    assert [names[0] for names in groups] == ["net.0.weight", "net.0.bias"]


def test_a_file_of_one_device_goes_on_sharded_with_its_parameters_in_another_order(tmp_path: Path) -> None:
    straight = fit_grouped("auto", SaveAtSteps(tmp_path))
    resumed = fit_grouped("fsdp2", resume=tmp_path / "micro-2.ckpt", members_reversed=True)
    torch.testing.assert_close(resumed, straight)


class Wide(Grouped):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.nn.Linear(4, 8, bias=False)
        self.net[4] = torch.nn.Linear(8, 9)
        self.net[5] = torch.nn.Linear(9, 4)


class ShardedWide(Wide, ShardedGrouped):
    pass


@pytest.mark.parametrize("strategy", ["auto", "fsdp2", "fsdp2_full"])
def test_a_checkpoint_of_a_model_of_another_shape_is_refused(strategy: str, tmp_path: Path) -> None:
    fit_grouped(strategy, SaveAtSteps(tmp_path))
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=4, strategy=strategy)
    told = (
        r"micro-2.ckpt: is of another model: net.4.weight has shape \(8, 8\) in it and \(9, 8\) in the model"
        r" \(and 3 more differences\); go on with the model that wrote it"
    )
    with pytest.raises(CheckpointError, match=told):
        trainer.fit(Wide() if strategy == "auto" else ShardedWide(), TinyData(), ckpt_path=tmp_path / "micro-2.ckpt")


def test_a_module_that_mends_the_weights_when_they_are_loaded_may(tmp_path: Path) -> None:
    class Renamed(TinyModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {f"old.{k}": v for k, v in checkpoint["state_dict"].items()}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {k.removeprefix("old."): v for k, v in checkpoint["state_dict"].items()}

    trainer = quiet_trainer(SafeCheckpoints(), Progress(), SaveAtSteps(tmp_path), max_steps=2)
    trainer.fit(Renamed(), TinyData())
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=4)
    trainer.fit(Renamed(), TinyData(), ckpt_path=tmp_path / "micro-2.ckpt")
    assert trainer.global_step == 4


# -- something else under the name of a checkpoint -------------------------------------------------------------------


def test_a_file_that_lightning_did_not_write_is_refused(tmp_path: Path) -> None:
    torch.save(TinyModule().state_dict(), tmp_path / "weights.ckpt")
    with pytest.raises(CheckpointError, match=r"weights.ckpt: is no Lightning checkpoint but a dict of net.0.weight, "):
        resume(tmp_path / "weights.ckpt")


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_full"])
def test_a_file_that_lightning_did_not_write_is_refused_by_a_sharded_module(strategy: str, tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match=r"list.ckpt: is no Lightning checkpoint but a list; give one that"):
        fit_grouped(strategy, resume=tmp_path / "list.ckpt")


def test_weights_saved_alone_are_no_place_to_go_on_from(tmp_path: Path) -> None:
    trainer = quiet_trainer(SafeCheckpoints(), Progress(), max_steps=1)
    trainer.fit(TinyModule(), TinyData())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match=r"weights.ckpt: holds weights and no optimizer state"):
        resume(tmp_path / "weights.ckpt")
    trainer.validate(TinyModule(), TinyData(validation_batches=1), ckpt_path=tmp_path / "weights.ckpt", verbose=False)


@pytest.mark.parametrize("strategy", ["auto", "fsdp2", "fsdp2_full"])
def test_a_save_that_finds_no_room_is_one_sentence_and_leaves_nothing(strategy: str, tmp_path: Path) -> None:
    said = r"start.ckpt: could not be written \(File too large; \S+ GiB are free"
    with files_of_at_most(1000), pytest.raises(CheckpointError, match=said):
        fit_grouped(strategy, SaveAtSteps(tmp_path))
    assert os.listdir(tmp_path) == []
