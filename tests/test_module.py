"""The GPT as a LightningModule, in fits of a second each."""

from __future__ import annotations

import csv
import dataclasses
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from compilation_counts import count_compilations, stand_in
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import Watch, quiet_trainer
from tiny_gpt_run import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    VOCAB,
    NumberedData,
    SaveEveryMicroBatch,
    equal_bits,
    fit,
    sample,
    tiny_module,
)
from torch.nn import functional as F

from lit_stable.callbacks import AccumulationWindows, EffectiveLR, LROverride, Progress, SafeCheckpoints
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.model.config import GPTConfig
from lit_stable.model.documents import document_ids
from lit_stable.model.gpt import GPT
from lit_stable.module import GPTModule, is_reported_step
from lit_stable.optim.options import OptimizerOptions, PatternOptions
from lit_stable.optim.schedule import LRSchedule
from lit_stable.training_loss import TrainingLoss

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


def test_a_window_that_an_epoch_cut_short_is_not_in_the_loss_of_the_next(monkeypatch):
    sizes: list[int] = []
    window = TrainingLoss.window
    monkeypatch.setattr(
        TrainingLoss, "window", lambda self, *rest: [sizes.append(len(self._counts)), window(self, *rest)][1]
    )

    class Cut(GPTModule):
        begun = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            super().on_train_batch_start(batch, batch_idx)
            self.begun += 1
            return -1 if self.begun == 6 else None

    fit(steps=3, module=Cut(CONFIG, module().schedule), validates=False)
    assert sizes == [GLOBAL_BATCH // MICRO_BATCH] * 3


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_rate_that_is_logged_is_the_one_that_was_used(precision):
    """Under a gradient scaler the step is taken behind the hook that logs, in plain precision around it."""
    rates: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if Progress.of(trainer).steps > len(rates):
                rates.append(float(trainer.callback_metrics["lr"]))

    callbacks = (LROverride(start=2, factor=0.5), Watch())
    fit(steps=5, precision=precision, module=module(), callbacks=callbacks, validates=False)
    assert rates == pytest.approx([module().schedule.lr(k) * (0.5 if k >= 2 else 1) for k in range(5)])


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
    options = OptimizerOptions(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, decay_embeddings=False)
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
    ("options", "kind"), [({"name": "adam"}, torch.optim.Adam), ({"name": "sgd"}, torch.optim.SGD)]
)
def test_other_optimizers_train_and_resume(options, kind, tmp_path):
    if kind is torch.optim.SGD:
        options = {**options, "momentum": 0.9}

    def run(steps: int, **more: Any) -> Any:
        return fit(steps=steps, module=module(optimizer=OptimizerOptions(**options)), **more)

    save = Watch("on_train_end", lambda trainer: trainer.save_checkpoint(tmp_path / "two.ckpt"))
    straight, _ = run(4), run(2, callbacks=(save,))
    resumed = run(4, ckpt_path=tmp_path / "two.ckpt")
    assert type(straight.trainer.optimizers[0]) is kind
    assert resumed.rows == straight.rows[2:]
    assert equal_bits(resumed.weights, straight.weights)


def test_groups_of_patterns_have_their_share_of_the_rate():
    options = OptimizerOptions(patterns={"blocks.0.*": PatternOptions(lr_factor=0.5)})
    seen: list[list[float]] = []

    def read(trainer: Trainer, *args: Any) -> None:
        seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    note = Watch("on_train_batch_end", read)
    run = fit(steps=3, module=module(optimizer=options), callbacks=(note,))
    names = [group["name"] for group in run.trainer.optimizers[0].param_groups]
    assert names == ["weights", "weights of blocks.0.*", "embeddings", "norms", "norms of blocks.0.*"]
    lr = run.module.schedule.lr(2)
    assert seen[-1] == [lr, lr / 2, lr, lr, lr / 2]


# -- decay -----------------------------------------------------------------------------------------------------------


class Decayed(Callback):
    """What each optimizer step took from a weight that got no gradient, relative to it."""

    def __init__(self) -> None:
        self.rows: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.weight = pl_module.gpt.blocks[1].mlp.up.weight
        self.before = self.weight.detach().double().clone()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if len(self.rows) < Progress.of(trainer).steps:
            self.rows.append(1 - (self.weight.detach().double() / self.before).median().item())


def test_independent_decay_takes_decay_times_rate_over_peak(tmp_path):
    decayed = Decayed()
    options = OptimizerOptions(weight_decay=0.1, decay="independent")
    run = fit(steps=4, module=module(optimizer=options), callbacks=(decayed,))
    shares = [run.module.schedule.lr(step) / 1e-2 for step in range(4)]
    assert shares[0] == 0
    assert decayed.rows == pytest.approx([0.1 * share for share in shares], abs=1e-6)
    assert run.trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.1  # between steps as the recipe has it


@pytest.mark.parametrize(
    ("decay", "extra", "factor"),
    [
        ("coupled", {}, 1e-2),  # of lr / peak: the step takes lr x weight_decay
        ("independent", {}, 1.0),
        ("independent", {"patterns": {"blocks.1.*": PatternOptions(lr_factor=0.25)}}, 1.0),  # whatever its own rate
    ],
)
def test_an_override_of_decay_is_meant_as_the_recipes_is(decay, extra, factor):
    decayed = Decayed()
    options = OptimizerOptions(decay=decay, **extra)
    override = LROverride(start=3, weight_decay=0.02)
    run = fit(steps=4, module=module(optimizer=options), callbacks=(decayed, override))
    share = run.module.schedule.lr(3) / 1e-2
    assert decayed.rows[3] == pytest.approx(0.02 * share * factor, abs=1e-6)


def test_independent_decay_leaves_no_modifier_behind():
    run = fit(steps=1, module=module(optimizer=OptimizerOptions(decay="independent")))
    mark = Progress.of(run.trainer).mark
    assert EffectiveLR.of(run.trainer).effective("weight_decay", mark, 0.5, 0) == 0.5


# -- what a step does otherwise --------------------------------------------------------------------------------------


def logged(steps: int, tmp_path: Path, **options: Any) -> list[dict[str, float]]:
    """The rows of the log of a fit; ``config`` is for the GPT, the rest for the module."""
    config = {**asdict(CONFIG), **options.pop("config", {})}
    logger = CSVLogger(tmp_path, name="", version="log")
    own = [Progress(), AccumulationWindows(GLOBAL_BATCH, MICRO_BATCH)]
    trainer = quiet_trainer(*own, max_steps=steps, log_every_n_steps=1, logger=logger)
    trainer.fit(GPTModule(GPTConfig(**config), module().schedule, **options), datamodule=NumberedData())
    with (tmp_path / "log" / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_z_loss_is_logged_apart_and_minimised_with_the_loss(tmp_path):
    plain, with_z = (logged(3, tmp_path / str(weight), z_loss=weight) for weight in (0.0, 0.1))
    assert not any("train/z_loss" in row for row in plain)
    first = with_z[0]
    assert first["train/loss"] == plain[0]["train/loss"]  # the cross-entropy alone
    assert first["train/z_loss"] == pytest.approx(0.1 * math.log(VOCAB) ** 2, rel=0.02)  # nearly uniform logits
    assert with_z[2]["train/z_loss"] < first["train/z_loss"]
    assert with_z[2]["train/loss"] != plain[2]["train/loss"]


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_the_head_gets_the_labels_in_training_where_no_z_loss_needs_its_logits(weight):
    seen = set()

    def note(head, args, kwargs):
        seen.add((head.training, kwargs["labels"] is not None))

    hook = Watch(
        "on_fit_start", lambda t: t.lightning_module.gpt.head.register_forward_pre_hook(note, with_kwargs=True)
    )
    fit(steps=1, module=module(z_loss=weight), callbacks=(hook,))
    assert seen == {(True, weight == 0), (False, False)}


def test_validation_knows_no_z_loss():
    losses = {}
    for weight in (0.0, 0.5):
        run = fit(steps=2, module=module(LRSchedule(peak=1e-9, shape="constant"), z_loss=weight))  # nearly no step
        losses[weight] = float(run.trainer.callback_metrics["val/loss"])
    assert losses[0.5] == pytest.approx(losses[0.0], rel=1e-6)


def test_the_share_of_the_embeddings_gradient_follows_the_step_and_a_resume(tmp_path):
    shrink = {"config": {"embed_grad_shrink": [(1, 0.1), (3, 0.5)]}}
    shares = [row["train/embed_gradient"] for row in logged(5, tmp_path, **shrink)]
    assert shares == pytest.approx([0.1, 0.1, 0.3, 0.5, 0.5])

    def run(steps: int, **more: Any) -> Any:
        return fit(steps=steps, embed_grad_shrink=[(1, 0.1), (3, 0.5)], **more)

    save = Watch("on_train_end", lambda trainer: trainer.save_checkpoint(tmp_path / "two.ckpt"))
    straight, _ = run(4), run(2, callbacks=(save,))
    resumed = run(4, ckpt_path=tmp_path / "two.ckpt")
    assert equal_bits(resumed.weights, straight.weights)
    assert not equal_bits(straight.weights, fit(steps=4).weights)


def test_without_shrinking_the_share_is_not_logged(tmp_path):
    assert not any("train/embed_gradient" in row for row in logged(1, tmp_path))


# -- documents -------------------------------------------------------------------------------------------------------


class WithEnd(NumberedData):
    """Data that name their end-of-document token."""

    eot_id = 39


def test_documents_are_those_between_the_tokens_that_the_data_name():
    config = {**asdict(CONFIG), "document_mask": True}
    trainer = quiet_trainer(Progress())
    run = GPTModule(GPTConfig(**config), module().schedule)
    value = trainer.validate(run, datamodule=WithEnd(), verbose=False)[0]["val/loss"]
    tokens = torch.stack([sample(10_000 + k) for k in range(4 * MICRO_BATCH)])
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    documents = document_ids(inputs, 39)
    assert documents.max() > 0
    with torch.no_grad():
        masked, whole = (
            F.cross_entropy(run.gpt(inputs, seen).flatten(0, 1), labels.flatten()).item() for seen in (documents, None)
        )
    assert value == pytest.approx(masked, rel=1e-6)
    assert value != pytest.approx(whole, rel=1e-6)


def test_documents_that_the_batch_numbers_come_before_those_of_separators():
    inputs = torch.stack([sample(k)[:-1] for k in range(2)])
    given = torch.arange(LENGTH).expand(2, -1) // 5
    runs = []
    for mask in (True, False):
        run = fit(steps=1, document_mask=mask, document_separator=3).module
        source = torch.zeros(2, dtype=torch.long)
        batch = {"input_ids": inputs, "labels": inputs, "source": source, "documents": given}
        with torch.no_grad():
            loss = run.training_step(batch, 0).item()
            expected = run.gpt(inputs, given if mask else None)
        assert loss == pytest.approx(F.cross_entropy(expected.flatten(0, 1), inputs.flatten()).item(), rel=1e-6)
        runs.append(loss)
    assert runs[0] != runs[1]


def test_a_document_mask_without_a_separator_is_refused():
    with pytest.raises(ValueError, match="NumberedData names no end-of-document token"):
        fit(steps=1, document_mask=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"z_loss": -1.0}, r"model\.z_loss=-1\.0: must be a finite number >= 0\."),
        ({"gradient_predivide": 0.0}, r"model\.gradient_predivide=0\.0: must be a finite number > 0, or null\."),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        module(**options)


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


def other_model(**options: Any) -> GPTModule:
    return GPTModule(dataclasses.replace(CONFIG, **options), LRSchedule(peak=1e-2, warmup=2, horizon=10))


def test_weights_that_would_mean_something_else_are_refused_in_training_and_validation(checkpoint):
    said_of_heads = r"n_head=4: the checkpoint is of a model with 2, and its weights would mean something else here"
    with pytest.raises(MisconfigurationException, match=said_of_heads):
        fit(steps=3, module=other_model(n_head=4), ckpt_path=checkpoint)
    trainer = quiet_trainer(Progress(), SafeCheckpoints())
    with pytest.raises(MisconfigurationException, match=said_of_heads):
        trainer.validate(other_model(n_head=4), datamodule=NumberedData(), ckpt_path=checkpoint, verbose=False)


def test_an_option_that_may_change_is_said(checkpoint, caplog):
    with said(caplog):
        fit(steps=3, module=other_model(dropout=0.1), ckpt_path=checkpoint)
    assert "model.gpt.dropout 0.0 -> 0.1 (recipe)" in caplog.messages


@pytest.mark.parametrize("change", [{"head_fp32": True}, {"attention_scale": "pre_sqrt"}], ids=str)
def test_the_head_and_the_place_of_the_scale_may_change_in_mid_run_which_is_another_rounding(change, tmp_path, caplog):
    options = {"steps": 3, "precision": "bf16-mixed", "attention_kernel": "explicit", "n_head": 4}
    straight = fit(callbacks=(SaveEveryMicroBatch(tmp_path, only=(4,)),), **options)
    with said(caplog):
        changed = fit(ckpt_path=tmp_path / "m4.ckpt", **options, **change)
    ((name, value),) = change.items()
    assert any(f"model.gpt.{name} " in line and f"-> {value} (recipe)" in line for line in caplog.messages)
    torch.testing.assert_close(torch.tensor(changed.rows), torch.tensor(straight.rows[1:]), rtol=2e-2, atol=1e-3)
    assert changed.rows != straight.rows[1:]


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


@pytest.mark.parametrize(("compile", "compiled"), [("auto", False), ("off", False), ("on", True), ("whole", True)])
def test_it_is_compiled_on_request_and_not_by_default_on_a_cpu(compile, compiled, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda target, **options: asked.append(target) or target)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: asked.append(self))
    fit(steps=1, module=module(compile=compile))
    assert bool(asked) == compiled


def test_samples_and_tokens_of_a_batch():
    assert module().count_batch({"input_ids": torch.zeros(3, 7, dtype=torch.long)}) == (3, 21)


def test_compiled_whole_it_is_one_graph_and_computes_the_same(monkeypatch):
    graphs = count_compilations(monkeypatch, stand_in)
    whole = fit(steps=3, module=tiny_module(compile="whole", recompute=True))
    assert {name for name, count in graphs.items() if count} == {"compute", "sample_losses"}
    assert graphs["compute"] == 1
    plain = fit(steps=3, module=tiny_module(compile="off"))
    assert whole.rows == plain.rows
    assert equal_bits(whole.weights, plain.weights)


def test_what_is_sharded_is_not_compiled_whole():
    with pytest.raises(MisconfigurationException, match=r"model\.compile=whole under FSDP2Strategy: .* set .* to on"):
        fit("fsdp2", steps=1, module=tiny_module(compile="whole"))


def test_gradients_are_gone_before_the_next_forward_pass():
    seen = set()

    def look(trainer, batch, number):
        kept = any(p.grad is not None for p in trainer.lightning_module.parameters())
        seen.add((number % (GLOBAL_BATCH // MICRO_BATCH) > 0, kept))  # within a window

    fit(steps=3, callbacks=(Watch("on_train_batch_start", look),))
    assert seen == {(False, False), (True, True)}
