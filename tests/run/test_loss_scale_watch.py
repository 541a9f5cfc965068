"""fp16 in a run: the scale in the log, skipped steps in the counters, an end at the floor, a change of precision."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from tiny_gpt_run import Fit, equal_bits, fit, largest_difference, tiny_module

from lit_stable.callbacks import Detectors, GradSpikeSkip, Progress
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.events import read_events
from lit_stable.callbacks.loss_scale_collapse import LossScaleCollapse
from lit_stable.run.loss_scale_watch import LossScaleWatch
from lit_stable.strategies.loss_scale import LossScale

pytestmark = pytest.mark.filterwarnings("ignore:GradSpikeSkip")


class Overflow(Callback):
    """Makes one gradient infinite in some steps, counted from 1, and keeps what was logged."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.logged: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 in self.steps:
            gradient = next(p.grad for p in pl_module.parameters() if p.ndim == 2)
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.view(-1)[0] = math.inf

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if "loss_scale" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["loss_scale"]))


def fp16(
    *overflows: int, strategy: str = "auto", steps: int = 5, callbacks: tuple[Any, ...] = (), **options: Any
) -> Fit:
    defaults = {"precision": "16-mixed", "max_norm": None, "n_layer": 1, "loss_scale": LossScale(init=256.0)}
    watch = (LossScaleWatch(), *callbacks)
    return fit(strategy, steps=steps, nan=Overflow(*overflows), callbacks=watch, **{**defaults, **options})


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_a_skipped_step_is_counted_and_the_scale_is_logged(strategy: str) -> None:
    run = fp16(2, 4, strategy=strategy)
    assert Progress.of(run.trainer).skipped == 2
    assert {int(s["step"]) for s in run.trainer.optimizers[0].state.values()} == {3}
    overflow = next(c for c in run.trainer.callbacks if isinstance(c, Overflow))
    per_step = dict.fromkeys(overflow.logged)  # several micro-batches a step
    assert list(per_step) == [256.0, 128.0]
    assert float(run.trainer.callback_metrics["loss_scale"]) == 64.0


def test_a_step_that_others_skip_too_is_counted_once_and_a_spike_leaves_the_scale() -> None:
    skip = GradSpikeSkip(threshold=1e-6)
    run = fp16(2, callbacks=(skip,))
    assert Progress.of(run.trainer).skipped == 5
    assert run.trainer.precision_plugin.scaler.get_scale() == 128.0
    (optimizer,) = run.trainer.optimizers
    assert not {"found_inf", "grad_scale", "stability_found_inf"} & vars(optimizer).keys()
    assert not optimizer._optimizer_step_pre_hooks


def test_without_a_loss_scale_it_does_nothing() -> None:
    plain, watched = fit(steps=2), fit(steps=2, callbacks=(LossScaleWatch(),))
    assert equal_bits(plain.weights, watched.weights)
    assert "loss_scale" not in watched.trainer.callback_metrics


def test_an_overflow_at_the_floor_ends_the_run_at_the_next_logging_step() -> None:
    policy = LossScale(init=2.0, window=10, floor=1.0)
    assert Progress.of(fp16(2, loss_scale=policy).trainer).skipped == 1  # halved to the floor, and on it goes
    with pytest.raises(
        MisconfigurationException,
        match=r"step 4: gradients overflowed at loss_scale\.floor=1, so no scale .* --trainer\.precision bf16-mixed",
    ):
        fp16(2, 3, loss_scale=policy)


class SaveAfter(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        progress = Progress.of(trainer)
        if progress.steps == self.step and not progress.pending_samples and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_a_resume_in_fp16_is_bit_equal_with_its_scale_and_hysteresis(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "strategy": strategy,
        "dropout": 0.1,
        "loss_scale": LossScale(init=256.0, window=2, hysteresis=2),
    }
    save = SaveAfter(2, tmp_path / "two.ckpt")
    straight = fp16(2, 4, callbacks=(save,), **options)
    again = fp16(2, 4, ckpt_path=save.path, **options)
    assert again.rows == straight.rows[2:]
    assert equal_bits(again.weights, straight.weights)
    states = [run.trainer.precision_plugin.scaler.state_dict() for run in (again, straight)]
    assert states[0] == states[1]
    assert states[0]["scale"] == 128.0  # the second overflow used up the hysteresis


def test_a_run_goes_from_fp16_to_bf16_to_fp32_and_back_and_says_so(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    said, runs, path = [], [], None
    for number, precision in enumerate(("16-mixed", "bf16-mixed", "32-true", "16-mixed")):
        caplog.clear()
        save = SaveAfter(2 + number, tmp_path / f"{number}.ckpt")
        runs.append(fp16(precision=precision, steps=2 + number, ckpt_path=path, callbacks=(save,)))
        said.append([r.getMessage() for r in caplog.records if "loss scale" in r.getMessage()])
        path = save.path
    assert said == [
        [],
        ["loss scale: 256 of the checkpoint dropped; bf16-mixed needs none"],
        [],
        ["loss scale: the checkpoint has none; begins at 256 (16-mixed)"],
    ]
    assert [row[0] for run in runs for row in run.rows] == [1, 2, 3, 4, 5]
    straight = fit(steps=5, max_norm=None, n_layer=1)
    assert largest_difference(runs[-1].weights, straight.weights) < 0.05  # that of five steps at up to 1e-2


def test_the_scale_goes_on_under_another_strategy(tmp_path: Path) -> None:
    save = SaveAfter(2, tmp_path / "two.ckpt")
    fp16(1, 2, steps=2, callbacks=(save,))
    run = fp16(strategy="fsdp2", steps=3, ckpt_path=save.path)
    assert float(run.trainer.callback_metrics["loss_scale"]) == 64.0


def test_an_optimizer_without_a_fused_kernel_is_counted_too() -> None:
    module = tiny_module(n_layer=1)
    configure = module.configure_optimizers

    def unfused() -> Any:
        for group in (optimizer := configure()).param_groups:
            group["fused"] = None
        optimizer._step_supports_amp_scaling = False
        return optimizer

    module.configure_optimizers = unfused  # type: ignore[method-assign]
    run = fp16(2, module=module)
    assert Progress.of(run.trainer).skipped == 1
    assert torch.isfinite(run.weights["gpt.wte.weight"]).all()


def test_a_run_that_stands_at_its_threshold_is_told_of() -> None:
    """Above the detectors' floor, with halvings too few to count: no step is taken, and the scale no longer falls."""
    detectors = Detectors(loss_scale=LossScaleCollapse(overflows=3), spike=None)
    run = fp16(*range(1, 6), loss_scale=LossScale(init=8.0, threshold=4.0), callbacks=(detectors,))
    found = read_events(Path(run.trainer.default_root_dir) / "events.jsonl")
    assert [(e.step, e.kind, e.evidence) for e in found] == [
        (3, "loss_scale_collapse", {"loss_scale": 4.0, "overflows": 3.0})
    ]
