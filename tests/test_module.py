"""The GPT as a LightningModule, in fits of a second each."""

from __future__ import annotations

import csv
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import Watch, quiet_trainer
from tiny_gpt_run import GLOBAL_BATCH, LENGTH, MICRO_BATCH, VOCAB, NumberedData, fit, sample, tiny_module
from torch.nn import functional as F

from lit_stable.callbacks import AccumulationWindows, Progress, SafeCheckpoints
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.module import AdamWOptions, GPTModule, is_reported_step
from lit_stable.optim.schedule import LRSchedule

CONFIG = tiny_module().config


def module(schedule: LRSchedule | None = None, **options: Any) -> GPTModule:
    return GPTModule(CONFIG, schedule or LRSchedule(peak=1e-2, warmup=2, horizon=10), **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the module above after 2 steps."""
    path = tmp_path_factory.mktemp("module") / "two.ckpt"
    save = Watch("on_train_end", lambda trainer: trainer.save_checkpoint(path))
    fit(steps=2, module=module(), callbacks=(save,))
    return path


# -- loss and learning rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-6), ("bf16-mixed", 1e-2)])
def test_the_loss_is_the_mean_over_the_whole_global_batch_in_fp32(precision, tolerance):
    initial: dict[str, torch.Tensor] = {}
    keep = Watch("on_train_start", lambda trainer: initial.update(clone(trainer.lightning_module.gpt.state_dict())))
    run = fit(steps=1, callbacks=(keep,), precision=precision)
    gpt = GPT(CONFIG)
    gpt.load_state_dict(initial)
    tokens = torch.stack([sample(k) for k in range(GLOBAL_BATCH)])
    with torch.no_grad():
        expected = F.cross_entropy(gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert run.module.window_loss.dtype == torch.float32
    assert float(run.module.window_loss) == pytest.approx(float(expected), rel=tolerance)


def clone(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("unit", "per_step"), [("steps", 1), ("samples", GLOBAL_BATCH), ("tokens", GLOBAL_BATCH * LENGTH)]
)
def test_the_rate_of_a_step_is_a_function_of_what_was_committed_before_it(unit, per_step):
    schedule = LRSchedule(peak=1e-2, warmup=2 * per_step, horizon=5 * per_step, floor=1e-3, unit=unit)
    run = fit(steps=6, module=module(schedule))
    assert [row[2] for row in run.rows] == [schedule.lr(k * per_step) for k in range(6)]


def test_all_micro_batches_of_a_window_have_one_rate():
    seen: list[tuple[int, float]] = []

    def note(trainer: Trainer, *args: Any) -> None:
        seen.append((Progress.of(trainer).steps, trainer.optimizers[0].param_groups[0]["lr"]))

    class Note(Callback):
        def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
            note(trainer)

    run = fit(steps=3, module=module(), callbacks=(Note(),))
    windows = GLOBAL_BATCH // MICRO_BATCH
    assert seen == [(k, run.module.schedule.lr(k)) for k in range(3) for _ in range(windows)]


def test_the_first_the_logging_and_the_last_step_are_reported():
    trainer = quiet_trainer(max_steps=10, log_every_n_steps=4)
    assert [step for step in range(1, 12) if is_reported_step(trainer, step)] == [1, 4, 8, 10]
    assert not is_reported_step(quiet_trainer(max_steps=-1, log_every_n_steps=0), 4)


def test_logged_are_loss_rate_and_progress_against_the_step(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="log")
    own = [Progress(), AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH)]
    trainer = quiet_trainer(*own, max_steps=5, log_every_n_steps=2, logger=logger, limit_val_batches=0)
    trainer.fit(module(), datamodule=NumberedData())
    with (tmp_path / "log" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [2, 4]
    assert [float(row["lr"]) for row in rows] == pytest.approx([module().schedule.lr(k) for k in (1, 3)])
    for name, size in (("samples", GLOBAL_BATCH), ("tokens", GLOBAL_BATCH * LENGTH), ("skipped", 0)):
        assert [float(row[f"progress/{name}"]) for row in rows] == [2 * size, 4 * size]
    assert 3.0 < float(rows[0]["train/loss"]) < 5.0


# -- optimizer -------------------------------------------------------------------------------------------------------


def test_there_is_one_optimizer_group_for_each_role_and_each_parameter_is_in_one():
    run = fit(steps=1, module=GPTModule(GPTConfig(VOCAB, 1, 2, 16, max_length=LENGTH, bias=True), module().schedule))
    groups = run.trainer.optimizers[0].param_groups
    decay = {group["name"]: group["weight_decay"] for group in groups}
    assert decay == {"weights": 0.1, "embeddings": 0.1, "norms": 0.0, "biases": 0.0}
    parameters = [id(p) for group in groups for p in group["params"]]
    assert sorted(parameters) == sorted(id(p) for p in run.module.parameters())
    assert len(set(parameters)) == len(parameters)
    assert all(group["fused"] for group in groups)


def test_every_parameter_has_its_state_before_the_first_step():
    steps: list[float] = []

    def note(trainer: Trainer) -> None:
        steps.extend(float(state["step"]) for state in trainer.optimizers[0].state.values())

    run = fit(steps=1, module=module(), callbacks=(Watch("on_train_start", note),))
    assert steps == [0.0] * len(list(run.module.parameters()))


def test_options_come_from_the_recipe_after_a_load_and_changes_are_printed(checkpoint, caplog):
    options = AdamWOptions(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, decay_embeddings=False)
    with said(caplog):
        run = fit(steps=3, module=module(optimizer=options), ckpt_path=checkpoint)
    groups = {group["name"]: group for group in run.trainer.optimizers[0].param_groups}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "weights": 0.3,
        "embeddings": 0.0,
        "norms": 0.0,
    }
    assert all(group["betas"] == (0.8, 0.95) and group["eps"] == 1e-6 for group in groups.values())
    changed = {message for message in caplog.messages if message.startswith("optimizer group ")}
    assert changed == {
        f"optimizer group {name}: {change} (recipe)"
        for name, decay in (
            ("weights", ["weight_decay 0.1 -> 0.3"]),
            ("embeddings", ["weight_decay 0.1 -> 0.0"]),
            ("norms", []),
        )
        for change in ("betas (0.9, 0.95) -> (0.8, 0.95)", "eps 1e-08 -> 1e-06", *decay)
    }


def test_an_unchanged_recipe_prints_nothing(checkpoint, caplog):
    with said(caplog):
        fit(steps=3, module=module(), ckpt_path=checkpoint)
    assert not [message for message in caplog.messages if "->" in message]


def said(caplog: pytest.LogCaptureFixture):
    """Let what callbacks say reach the captured log: quiet fits raise the level."""
    logging.getLogger("lightning.pytorch").propagate = True
    return caplog.at_level(logging.INFO, logger="lightning.pytorch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 1.0)}, r"optimizer.betas=\(0.9, 1.0\): each must lie in \[0, 1\)\."),
        ({"eps": 0.0}, r"optimizer.eps=0.0: must be > 0\."),
        ({"weight_decay": -1.0}, r"optimizer.weight_decay=-1.0: must be >= 0\."),
        ({"eps": -1.0, "weight_decay": -1.0}, r"eps=-1.0: .*\noptimizer.weight_decay=-1.0"),
    ],
)
def test_wrong_optimizer_options_are_refused_all_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        AdamWOptions(**options)


# -- conflicts between recipe and checkpoint -------------------------------------------------------------------------


def changed(on_conflict: str) -> GPTModule:
    return module(LRSchedule(peak=5e-2, warmup=2, horizon=10, on_conflict=on_conflict))


def test_another_schedule_than_the_checkpoints_is_an_error_by_default(checkpoint):
    with pytest.raises(MisconfigurationException, match=r"schedule.peak 0.01 in the checkpoint but 0.05 in the recipe"):
        fit(steps=3, module=changed("error"), ckpt_path=checkpoint)


@pytest.mark.parametrize(
    ("policy", "peak", "line"),
    [
        ("override", 5e-2, "model.schedule.peak: 0.01 -> 0.05 (on_conflict: override)"),
        ("checkpoint", 1e-2, "model.schedule.peak: 0.05 -> 0.01 (on_conflict: checkpoint)"),
    ],
)
def test_the_policy_decides_which_schedule_is_followed(checkpoint, caplog, policy, peak, line):
    with said(caplog):
        run = fit(steps=4, module=changed(policy), ckpt_path=checkpoint)
    expected = LRSchedule(peak=peak, warmup=2, horizon=10)
    assert [row[2] for row in run.rows] == [expected.lr(2), expected.lr(3)]
    assert line in caplog.messages


def test_an_override_is_what_the_next_checkpoint_holds(checkpoint, tmp_path):
    save = Watch("on_train_end", lambda trainer: trainer.save_checkpoint(tmp_path / "three.ckpt"))
    fit(steps=3, module=changed("override"), ckpt_path=checkpoint, callbacks=(save,))
    run = fit(steps=4, module=changed("error"), ckpt_path=tmp_path / "three.ckpt")
    assert run.rows[-1][2] == run.module.schedule.lr(3)


def test_a_conflict_does_not_keep_a_checkpoint_from_being_validated(checkpoint):
    trainer = quiet_trainer(Progress(), SafeCheckpoints())
    assert trainer.validate(changed("error"), datamodule=NumberedData(), ckpt_path=checkpoint, verbose=False)


# -- validation ------------------------------------------------------------------------------------------------------


def test_data_that_do_not_name_their_validation_sets_get_numbers():
    run = fit(steps=2, module=module())
    metrics = {name: float(value) for name, value in run.trainer.callback_metrics.items() if name.startswith("val/")}
    assert set(metrics) == {"val/loss", "val/0/loss", "val/0/perplexity"}
    tokens = torch.stack([sample(10_000 + k) for k in range(4 * MICRO_BATCH)])
    with torch.no_grad():
        loss = F.cross_entropy(run.module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert metrics["val/loss"] == pytest.approx(float(loss), rel=1e-6)
    assert metrics["val/0/perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)


class TwoSets(NumberedData):
    """Two loaders for validation, and twice as many for the test."""

    def val_dataloader(self) -> Any:
        return [super(TwoSets, self).val_dataloader() for _ in range(2)]

    def test_dataloader(self) -> Any:
        return [*self.val_dataloader(), *self.val_dataloader()]


def test_each_loader_is_a_set_in_validation_and_test():
    trainer = quiet_trainer(Progress())
    metrics = trainer.validate(module(), datamodule=TwoSets(), verbose=False)[0]
    assert {name for name in metrics if name.endswith("loss")} == {"val/loss", "val/0/loss", "val/1/loss"}
    metrics = trainer.test(module(), datamodule=TwoSets(), verbose=False)[0]
    assert {name for name in metrics if name.endswith("loss")} == {"val/loss", *(f"val/{k}/loss" for k in range(4))}


# -- model -----------------------------------------------------------------------------------------------------------


def test_the_seed_alone_decides_the_initial_weights():
    weights = [fit(steps=1, module=module(seed_init=seed)).rows[0] for seed in (0, 0, 1)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_configuring_the_model_twice_builds_it_once():
    run = fit(steps=1, module=module())
    gpt = run.module.gpt
    run.module.configure_model()
    assert run.module.gpt is gpt


@pytest.mark.parametrize(("compile", "compiled"), [("auto", False), ("off", False), ("on", True)])
def test_blocks_are_compiled_on_request_and_not_by_default_on_a_cpu(compile, compiled, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda target, **options: asked.append(target) or target)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: asked.append(self))
    fit(steps=1, module=module(compile=compile))
    assert bool(asked) == compiled


def test_samples_and_tokens_of_a_batch():
    assert module().count_batch({"input_ids": torch.zeros(3, 7, dtype=torch.long)}) == (3, 21)
