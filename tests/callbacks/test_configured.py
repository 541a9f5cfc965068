"""What a checkpoint brings along, and which of it and of the code is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scheduled_fit import SCHEDULERS, Scheduled, fit, take_what_is_printed
from tiny_fit import TinyModule, adamw
from torch.optim import lr_scheduler as schedulers

from lit_stable.callbacks import LROverride


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return take_what_is_printed(monkeypatch)


def test_options_changed_in_the_code_are_written_over_restored_ones_and_printed(
    tmp_path: Path, printed: list[str]
) -> None:
    fit(TinyModule(adamw(weight_decay=0.1)), steps=2, save=tmp_path / "a.ckpt")
    trainer, _ = fit(
        TinyModule(adamw(weight_decay=0.01, betas=(0.8, 0.9))),
        LROverride(factor=0.5),
        steps=3,
        resume=tmp_path / "a.ckpt",
    )
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.01
    assert "LROverride: group 0 weight_decay 0.1 -> 0.01" in printed
    assert "LROverride: group 0 betas [0.9, 0.999] -> [0.8, 0.9]" in printed


def cosine(horizon: int) -> Any:
    return lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 3), schedulers.CosineAnnealingLR(o, horizon)], [3]
    )


BEFORE_AND_AFTER = {
    "base rates": ((None, 0.1), (None, 0.02)),
    "peak of a cosine": ((SCHEDULERS["CosineAnnealingLR"], 0.1), (SCHEDULERS["CosineAnnealingLR"], 0.02)),
    "horizon inside SequentialLR": ((cosine(6), 0.1), (cosine(40), 0.1)),
    "function of LambdaLR": (
        (SCHEDULERS["LambdaLR"], 0.1),
        (lambda o: schedulers.LambdaLR(o, lambda k: 1 / (k + 2)), 0.1),
    ),
    "length of a cycle": (
        (lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=6), 0.1),
        (lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=12), 0.1),
    ),
}
changed = pytest.mark.parametrize("before_and_after", BEFORE_AND_AFTER.values(), ids=BEFORE_AND_AFTER)
NOT_YET = 99  # a start beyond the run: only what happens on resume is seen


@changed
def test_changed_hyperparameters_are_refused_by_default(before_and_after: Any, tmp_path: Path) -> None:
    before, after = before_and_after
    fit(Scheduled(*before), LROverride(NOT_YET, factor=0.5), steps=4, save=tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationException, match=r"trained with other hyper-parameters \(.* now"):
        fit(Scheduled(*after), LROverride(NOT_YET, factor=0.5), steps=6, resume=tmp_path / "a.ckpt")


@changed
def test_override_follows_the_code_from_the_first_resumed_step_on(before_and_after: Any, tmp_path: Path) -> None:
    """Cases D7 and D8: as if the run had had the new schedule from its first step on."""
    before, after = before_and_after
    checkpoint = tmp_path / "a.ckpt"
    _, wanted = fit(Scheduled(*after), steps=9)
    fit(Scheduled(*before), LROverride(NOT_YET, factor=0.5), steps=4, save=checkpoint)
    used: list[list[float]] = []
    for stop in (5, 7, 9):
        override = LROverride(NOT_YET, factor=0.5, on_conflict="override")
        _, rates = fit(Scheduled(*after), override, steps=stop, resume=checkpoint, save=checkpoint)
        used += rates.used
    assert used == wanted.used[4:]


@changed
def test_checkpoint_follows_the_checkpoint_except_for_functions(before_and_after: Any, tmp_path: Path) -> None:
    before, after = before_and_after
    checkpoint = tmp_path / "a.ckpt"
    _, wanted = fit(Scheduled(*before), steps=6)
    fit(Scheduled(*before), LROverride(NOT_YET, factor=0.5), steps=4, save=checkpoint)
    override = LROverride(NOT_YET, factor=0.5, on_conflict="checkpoint")
    _, rates = fit(Scheduled(*after), override, steps=6, resume=checkpoint)
    if before is BEFORE_AND_AFTER["function of LambdaLR"][0]:
        assert rates.used[0] == wanted.used[4]  # restored; the code's function takes over with the scheduler's step
        assert rates.used[1][0] == pytest.approx(0.1 / 7)
    else:
        assert rates.used == wanted.used[4:]


def test_a_function_that_a_checkpoint_cannot_hold_is_told(tmp_path: Path, printed: list[str]) -> None:
    (before, after), checkpoint = BEFORE_AND_AFTER["function of LambdaLR"], tmp_path / "a.ckpt"
    fit(Scheduled(*before), LROverride(NOT_YET, factor=0.5), steps=2, save=checkpoint)
    fit(Scheduled(*after), LROverride(NOT_YET, factor=0.5, on_conflict="checkpoint"), steps=3, resume=checkpoint)
    assert any("a LambdaLR's function is in no checkpoint" in line for line in printed)


def test_a_table_that_ends_is_sampled_as_far_as_it_goes() -> None:
    table = [1.0, 0.5, 0.25, 0.125, 0.1]
    trainer, _ = fit(
        Scheduled(lambda o: schedulers.LambdaLR(o, lambda k: table[k])), LROverride(start=1, factor=0.5), steps=3
    )
    override = next(c for c in trainer.callbacks if isinstance(c, LROverride))  # type: ignore[attr-defined]
    assert override.state_dict()["recorded"] == {"LambdaLR lr_lambda 0": [1.0, 0.5, 0.25, 0.1]} | {
        "LambdaLR lr_lambda 1": [1.0, 0.5, 0.25, 0.1]
    }


def test_a_rate_without_a_scheduler_and_without_a_record_is_told(tmp_path: Path, printed: list[str]) -> None:
    """Case D2 in a checkpoint that never had the callback: who sets the rate is not known there."""
    fit(Scheduled(lr=0.1), steps=2, save=tmp_path / "a.ckpt")
    _, rates = fit(Scheduled(lr=0.02), LROverride(NOT_YET, factor=0.5), steps=3, resume=tmp_path / "a.ckpt")
    assert rates.used[0][0] == 0.1
    assert any("restored the rates [0.1, 0.02] and the code has [0.02, 0.004]" in line for line in printed)
    override = LROverride(NOT_YET, factor=0.5, on_conflict="override")
    _, rates = fit(Scheduled(lr=0.02), override, steps=3, resume=tmp_path / "a.ckpt")
    assert rates.used[0][0] == 0.02


def test_a_new_peak_is_relative_to_the_rates_that_are_followed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "a.ckpt"
    fit(Scheduled(lr=0.1), LROverride(NOT_YET, factor=0.5), steps=2, save=checkpoint)
    for policy in ("override", "checkpoint"):
        override = LROverride(peak=0.05, on_conflict=policy)  # type: ignore[arg-type]
        _, rates = fit(Scheduled(lr=0.02), override, steps=4, resume=checkpoint)
        assert rates.used[1] == pytest.approx([0.05, 0.01])


def test_a_cycle_that_has_ended_stays_at_its_last_rate_and_is_saved_and_resumed(tmp_path: Path) -> None:
    def module() -> Scheduled:
        return Scheduled(lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=5))

    with pytest.raises(ValueError, match="Tried to step 6 times"):
        fit(module(), steps=9)
    checkpoint, used = tmp_path / "a.ckpt", []
    for stop in (3, 7, 9):
        resume = checkpoint if used else None
        trainer, rates = fit(module(), LROverride(NOT_YET, factor=0.5), steps=stop, resume=resume, save=checkpoint)
        used += [lrs[0] for lrs in rates.used]
    assert used[4:] == [used[4]] * 5
    assert used[4] == pytest.approx(0.1 / 25 / 1e4)
    assert type(trainer.lr_scheduler_configs[0].scheduler) is schedulers.OneCycleLR
    assert torch.load(checkpoint, weights_only=True)["lr_schedulers"][0]["last_epoch"] == 9


def test_a_cycle_made_shorter_than_the_run_so_far_has_ended(tmp_path: Path) -> None:
    def module(total: int) -> Scheduled:
        return Scheduled(lambda o: schedulers.OneCycleLR(o, [0.1, 0.02], total_steps=total))

    fit(module(12), LROverride(NOT_YET, factor=0.5), steps=6, save=tmp_path / "a.ckpt")
    override = LROverride(NOT_YET, factor=0.5, on_conflict="override")
    _, rates = fit(module(4), override, steps=8, resume=tmp_path / "a.ckpt")
    assert [lrs[0] for lrs in rates.used] == pytest.approx([0.1 / 25 / 1e4] * 2)


def test_a_scheduler_that_watches_a_metric_keeps_what_it_saw(tmp_path: Path) -> None:
    class Plateau(TinyModule):
        patience = 0

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.log("constant", 1.0)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer(self.parameters())
            scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=self.patience)
            return [optimizer], [{"scheduler": scheduler, "monitor": "constant", "interval": "step"}]

    class Patient(Plateau):
        patience = 3

    checkpoint = tmp_path / "a.ckpt"
    fit(Plateau(), LROverride(NOT_YET, factor=0.5), steps=3, save=checkpoint)
    with pytest.raises(MisconfigurationException, match="ReduceLROnPlateau patience 0 in the checkpoint but 3 now"):
        fit(Patient(), LROverride(NOT_YET, factor=0.5), steps=4, resume=checkpoint)
    override = LROverride(NOT_YET, factor=0.5, on_conflict="override")
    _, rates = fit(Patient(), override, steps=6, resume=checkpoint)
    assert [lrs[0] for lrs in rates.used] == [0.0125] * 3
