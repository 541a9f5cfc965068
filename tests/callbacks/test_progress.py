from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import CutsEpochsShort, Host, WithholdsSteps, loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from tiny_fit import SaveAtSteps, Stream, TinyData, TinyModule, Watch, quiet_trainer, train_more
from torch.utils.data import DataLoader

from lit_stable.callbacks import AccumulationWindows, GradClip, OptimizerReset, Progress
from lit_stable.callbacks.progress import Mark


def test_of_installs_one_progress_at_the_front_and_finds_it_again() -> None:
    foreign = Watch("on_fit_start", lambda trainer: None)
    trainer = quiet_trainer(foreign)
    progress = Progress.of(trainer)
    assert trainer.callbacks[:2] == [progress, foreign]
    assert Progress.of(trainer) is progress


def test_counts_committed_steps_samples_and_tokens() -> None:
    trainer = quiet_trainer(Progress(), max_steps=3)
    trainer.fit(TinyModule(), TinyData(batch_size=2))
    # A batch is (2, 4): 2 samples of 4 tokens.
    assert Progress.of(trainer).mark == Mark(steps=3, samples=6, tokens=24)
    assert Progress.of(trainer).position == 6


def test_micro_batches_of_an_open_window_are_pending_and_not_committed() -> None:
    seen: list[tuple[int, int, int]] = []

    def note(trainer: Any, *rest: Any) -> None:
        progress = Progress.of(trainer)
        seen.append((progress.samples, progress.pending_samples, progress.start.samples))

    trainer = quiet_trainer(Progress(), Watch("on_before_backward", note), max_steps=2, accumulate_grad_batches=2)
    trainer.fit(TinyModule(), TinyData())
    assert seen == [(0, 2, 0), (0, 4, 0), (4, 2, 4), (4, 4, 4)]


def test_is_committed_before_the_schedulers_step_and_before_a_save(tmp_path: Path) -> None:
    trainer = quiet_trainer(SaveAtSteps(tmp_path), Progress(), max_steps=2, accumulate_grad_batches=2)
    trainer.fit(TinyModule(), TinyData())
    saved = [torch.load(tmp_path / f"micro-{n}.ckpt")["callbacks"]["Progress"]["samples"] for n in (1, 2, 3, 4)]
    assert saved == [0, 4, 4, 8]


def test_a_module_may_count_its_own_batches() -> None:
    class Packed(TinyModule):
        def count_batch(self, batch: torch.Tensor) -> tuple[int, int]:
            return 5, 70

    trainer = quiet_trainer(Progress(), max_steps=2)
    trainer.fit(Packed(), TinyData())
    assert Progress.of(trainer).mark == Mark(2, 10, 140)


def test_dropped_ranges_move_the_position_and_no_counter() -> None:
    progress = Progress()
    progress.samples = 4
    progress.drop([(8, 12), (2, 6)], request="steps 1-2")
    progress.drop([(6, 8)], request="step 3")
    assert progress.dropped == [(2, 12)]
    assert progress.requests == ["steps 1-2", "step 3"]
    assert (progress.samples, progress.position) == (4, 14)


def test_state_survives_a_resume(tmp_path: Path) -> None:
    first = quiet_trainer(Progress(), max_steps=3)
    first.fit(TinyModule(), TinyData())
    Progress.of(first).drop([(6, 8)], request="a")
    Progress.of(first).note_skipped(True)
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(Progress(), max_steps=4)
    second.fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "a.ckpt")
    progress = Progress.of(second)
    assert progress.mark == Mark(4, 8, 32)
    assert (progress.skipped, progress.applied, progress.dropped, progress.requests) == (1, 3, [(6, 8)], ["a"])
    assert progress.position == 10


def test_skips_are_summed_from_the_host_and_from_the_device() -> None:
    progress = Progress()
    progress.note_skipped(torch.tensor(True))
    progress.note_skipped(torch.tensor(False))
    progress.note_skipped(True)
    progress.note_skipped(False)
    progress.note_skipped(torch.tensor(True))
    progress.steps = 5
    assert (progress.skipped, progress.applied) == (3, 2)


class NoLoss(TinyModule):
    """Returns no loss in its second window."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        return None if self.trainer.global_step == 1 else super().training_step(batch, batch_idx)


def test_a_window_without_any_loss_counts_as_skipped() -> None:
    trainer = quiet_trainer(Progress(), max_steps=3, accumulate_grad_batches=2)
    trainer.fit(NoLoss(), TinyData())
    adam_steps = {int(s["step"]) for s in trainer.optimizers[0].state.values()}
    progress = Progress.of(trainer)
    assert (progress.steps, progress.skipped) == (3, 1)
    assert adam_steps == {progress.applied} == {2}


def test_a_window_without_any_loss_is_skipped_once_beside_a_clip() -> None:
    trainer = quiet_trainer(GradClip(0.1), max_steps=3)
    trainer.fit(NoLoss(), TinyData())
    assert Progress.of(trainer).skipped == 1


def test_a_second_optimizer_on_the_same_batch_commits_nothing() -> None:
    class TwoOptimizers(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            assert loss is not None
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[0].parameters()), torch.optim.SGD(self.net[3].parameters())]

    trainer = quiet_trainer(Progress(), max_steps=4)
    trainer.fit(TwoOptimizers(), TinyData())
    assert Progress.of(trainer).mark == Mark(steps=2, samples=4, tokens=16)


def test_counters_that_were_given_yield_to_those_in_the_checkpoint(tmp_path: Path) -> None:
    first = quiet_trainer(Progress(), max_steps=2)
    first.fit(TinyModule(), TinyData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(Progress(samples=999, tokens=999), max_steps=3)
    second.fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "a.ckpt")
    assert Progress.of(second).samples == 6


def test_a_progress_installed_after_the_state_was_restored_is_refused(tmp_path: Path) -> None:
    class LateData(LightningDataModule):
        def train_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(Stream(Progress.of(self.trainer).position, 2), batch_size=None)

    first = quiet_trainer(max_steps=2)
    first.fit(TinyModule(), LateData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = quiet_trainer(max_steps=4)
    with pytest.raises(
        MisconfigurationException, match=r"at step 2 .*; put `Progress\(\)` into the trainer's callbacks"
    ):
        second.fit(TinyModule(), LateData(), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("make", [Progress, GradClip, lambda: OptimizerReset(start=1)])
def test_what_was_learned_with_another_trainer_is_no_beginning(make: Any) -> None:
    callback = make()
    name = type(callback).__name__
    quiet_trainer(callback, max_steps=2).fit(TinyModule(), TinyData())
    with pytest.raises(
        MisconfigurationException, match=rf"`{name}`: has trained with another .* own `{name}\(\.\.\.\)`"
    ):
        quiet_trainer(callback, max_steps=2).fit(TinyModule(), TinyData())


def test_a_callback_may_go_on_with_another_trainer_from_a_checkpoint(tmp_path: Path) -> None:
    progress = Progress()
    first = quiet_trainer(progress, max_steps=2)
    first.fit(TinyModule(), TinyData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    quiet_trainer(progress, max_steps=3).fit(TinyModule(), TinyData(), ckpt_path=tmp_path / "a.ckpt")
    assert progress.mark == Mark(3, 6, 24)


def test_goes_on_counting_in_a_second_fit() -> None:
    trainer = quiet_trainer(Progress(), AccumulationWindows(4, 2), max_steps=2)
    module = TinyModule()
    trainer.fit(module, TinyData())
    train_more(trainer, 3)
    trainer.fit(module, TinyData())
    assert Progress.of(trainer).mark == Mark(5, 20, 80)


def test_the_scheduled_position_is_that_of_the_open_window_less_what_was_held() -> None:
    progress = Progress()
    progress.start = Mark(5, 20, 80)
    progress.note_held(Mark(1, 4, 16))
    progress.note_held(Mark(1, 4, 16))
    assert progress.scheduled == Mark(3, 12, 48)
    twin = Progress()
    twin.load_state_dict(progress.state_dict())
    assert twin.held == Mark(2, 8, 32)


def test_whether_the_last_step_was_skipped_is_restored_and_an_older_checkpoint_loads() -> None:
    progress = Progress()
    progress.note_skipped(torch.tensor(True))
    assert progress.skipped_last
    state = progress.state_dict()
    twin = Progress()
    twin.load_state_dict(state)
    assert (twin.skipped, twin.skipped_last) == (1, True)
    del state["skipped_last"]
    twin.load_state_dict(state)
    assert (twin.skipped, twin.skipped_last) == (1, False)


def test_a_checkpoint_from_before_schedules_were_held_loads() -> None:
    state = Progress().state_dict()
    del state["held"]
    progress = Progress()
    progress.note_held(Mark(1, 1, 1))
    progress.load_state_dict(state)
    assert progress.held == Mark(0, 0, 0)


def test_a_step_that_the_module_withholds_counts_as_skipped() -> None:
    trainer = quiet_trainer(Progress(), GradClip(), max_steps=-1, max_epochs=2)
    trainer.fit(WithholdsSteps(), loader())
    progress = Progress.of(trainer)
    assert progress.mark == Mark(6, 20, 80)
    assert trainer.global_step == 6
    adam_steps = {int(s["step"]) for s in trainer.optimizers[0].state.values()}
    assert (progress.skipped, adam_steps) == (2, {progress.applied})


@pytest.mark.parametrize("windows", [[], [AccumulationWindows(8, 4)]], ids=["alone", "windows"])
def test_an_epoch_that_is_cut_short_within_a_window_leaves_nothing_pending(windows: list[Any]) -> None:
    trainer = quiet_trainer(Progress(), *windows, max_steps=-1, max_epochs=3)
    trainer.fit(CutsEpochsShort(), loader())
    progress = Progress.of(trainer)
    # Without windows each epoch steps on its first batch; with them no window of two batches is ever full.
    assert (progress.mark, trainer.global_step) == ((Mark(0, 0, 0), 0) if windows else (Mark(3, 12, 48), 3))


def test_a_training_step_that_takes_its_batches_itself_is_refused() -> None:
    class TakesBatches(Host):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.loss(next(dataloader_iter)[0])

    trainer = quiet_trainer(Progress(), max_steps=2)
    with pytest.raises(
        MisconfigurationException, match=r"training_step\(dataloader_iter\)`: .*; take \(batch, batch_idx"
    ):
        trainer.fit(TakesBatches(), loader())
