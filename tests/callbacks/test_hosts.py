"""All callbacks together in projects of many kinds: the counts are right, each shows that it is on, none falls over."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from hosts import (
    BATCH,
    ByEpochs,
    Gan,
    Host,
    LowRank,
    Manual,
    OwnClipping,
    Protocol,
    Rows,
    Stream,
    Wrapper,
    as_records,
    loader,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from tiny_fit import adamw, assert_same_bits, quiet_trainer, snapshot
from torch import nn

from lit_stable.callbacks import (
    AccumulationWindows,
    BatchSizeWarmup,
    EffectiveLR,
    GracefulStop,
    GradClip,
    GradNorm,
    GradSpikeSkip,
    LayerNormFreeze,
    LROverride,
    OptimizerReset,
    Progress,
    SafeCheckpoints,
    SequenceLengthWarmup,
    StepSeed,
    ValidateEverySteps,
)
from lit_stable.callbacks.progress import Mark

CLIPPING = ("clip_frac", "clip_level")
SKIPPING = ("spike_score", "spikes", "overflows")
OTHERS = ("frozen_tensors", "grad_norm", "lr", "lr_factor", "optimizer_held", "override_lr", "sequence_length")


def observing() -> list[Any]:
    """Those that work in any project."""
    steady: list[Any] = [Progress(), StepSeed(1), GradNorm(), SafeCheckpoints(), GracefulStop(), ValidateEverySteps(2)]
    return [*steady, LROverride(start=2, factor=0.5), SequenceLengthWarmup("4 for 1 steps", max_length=4)]


def everything() -> list[Any]:
    acting: list[Any] = [GradSpikeSkip(), LayerNormFreeze([{"stop": 2}]), OptimizerReset(start=3, hold_steps=1)]
    return [*observing(), *acting, GradClip(), AccumulationWindows(2 * BATCH, BATCH)]


def without(*classes: type) -> list[Any]:
    return [callback for callback in everything() if not isinstance(callback, classes)]


def fit(callbacks: list[Any], module: Any = None, data: Any = None, **options: Any) -> Any:
    defaults = {"max_steps": -1, "max_epochs": 2, "log_every_n_steps": 1, "check_val_every_n_epoch": None}
    trainer = quiet_trainer(*callbacks, **{**defaults, **options})
    trainer.fit(Host() if module is None else module, loader() if data is None else data, loader(batch_size=2))
    return trainer


def shown(trainer: Any) -> set[str]:
    return {name.removeprefix("stability/") for name in trainer.callback_metrics if name.startswith("stability/")}


# A window is two batches of four samples; an epoch has three batches, the last of two: windows of 8 and 2 samples.
TWO_EPOCHS = Mark(steps=4, samples=20, tokens=80)

HOSTS: dict[str, tuple[dict[str, Any], Mark]] = {
    "finite": ({}, TWO_EPOCHS),
    "finite, last batch dropped": ({"data": lambda: loader(drop_last=True)}, Mark(2, 16, 64)),
    "iterable": ({"data": lambda: loader(Stream())}, TWO_EPOCHS),
    "tuple": ({"data": lambda: loader(Rows(lambda row, index: (row, index)))}, TWO_EPOCHS),
    "dict": ({"data": lambda: loader(Rows(lambda row, index: {"label": float(index), "row": row}))}, TWO_EPOCHS),
    "dataclass": ({"data": lambda: loader(collate_fn=as_records)}, TWO_EPOCHS),
    "limited": ({"limit_train_batches": 1}, Mark(2, 8, 32)),
    "overfitting": ({"overfit_batches": 2}, Mark(2, 16, 64)),
    "max_steps": ({"max_steps": 3, "max_epochs": -1}, Mark(3, 18, 72)),
    "epoch scheduler": ({"module": ByEpochs}, TWO_EPOCHS),
    "frozen parts": ({"module": LowRank}, TWO_EPOCHS),
    "compiled": ({"module": lambda: torch.compile(Host(), backend="eager")}, TWO_EPOCHS),
    "16-mixed": ({"precision": "16-mixed"}, TWO_EPOCHS),  # which Lightning makes bf16-mixed of on CPUs
    "64-true": ({"precision": "64-true"}, TWO_EPOCHS),
    "anomaly detection": ({"detect_anomaly": True}, TWO_EPOCHS),
    "fast_dev_run": ({"fast_dev_run": True}, Mark(1, 4, 16)),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.filterwarnings("ignore")
def test_all_of_them_together_in_one_project(host: str) -> None:
    options, expected = HOSTS[host]
    made = {name: value() if name in ("module", "data") else value for name, value in options.items()}
    callbacks = everything()
    if host == "frozen parts":  # norms that are frozen already are no business of a window
        callbacks = [*without(LayerNormFreeze), LayerNormFreeze([{"modules": ["extra"], "stop": 2}])]
    trainer = fit(callbacks, **made)
    assert Progress.of(trainer).mark == expected
    assert Progress.of(trainer).skipped == 0
    assert shown(trainer) == {*CLIPPING, *SKIPPING, *OTHERS}


def test_a_project_that_logs_nothing_trains_the_same() -> None:
    runs = []
    for options in ({}, {"logger": False}, {"barebones": True, "logger": None, "log_every_n_steps": None}):
        bare = {"enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
        trainer = fit(everything(), **{**options, **(bare if "barebones" in options else {})})
        runs.append((snapshot(trainer), Progress.of(trainer).mark))
    for run in runs[1:]:
        assert run[1] == runs[0][1] == TWO_EPOCHS
        assert_same_bits(run[0], runs[0][0])


def test_a_second_fit_goes_on() -> None:
    trainer = fit(everything(), module := Host())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(), loader(batch_size=2))
    assert Progress.of(trainer).mark == Mark(6, 30, 120)


class Evaluates(Host):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self.loss(batch))

    def predict_step(self, batch: Any) -> Any:
        return self.net(batch)


def test_evaluations_before_and_after_a_fit_change_no_count() -> None:
    trainer = quiet_trainer(*everything(), max_steps=2, check_val_every_n_epoch=None)
    module = Evaluates()
    for expected in (Mark(0, 0, 0), Mark(2, 10, 40)):
        if expected.steps:
            trainer.fit(module, loader(), loader())
        trainer.validate(module, loader(), verbose=False)
        trainer.test(module, loader(), verbose=False)
        trainer.predict(module, loader())
        assert Progress.of(trainer).mark == expected


@pytest.mark.parametrize(("module", "steps"), [(Manual, 6), (Gan, 6)], ids=["manual", "two optimizers"])
def test_under_manual_optimization_a_batch_that_is_stepped_on_is_a_step(module: Any, steps: int) -> None:
    trainer = fit(observing(), module())
    assert Progress.of(trainer).mark == Mark(steps, 20, 80)
    assert shown(trainer) == set(OTHERS) - {"frozen_tensors", "optimizer_held"}


MANUAL = "`Manual.automatic_optimization=False`"


@pytest.mark.parametrize(
    ("callback", "host", "sentence"),
    [
        (GradClip, {"module": Manual}, MANUAL + ".*; use automatic optimization, or clip in training_step"),
        (GradSpikeSkip, {"module": Manual}, MANUAL + ".*; use automatic optimization"),
        (lambda: AccumulationWindows(8, 4), {"module": Manual}, MANUAL + ".*; accumulate in training_step"),
        (
            lambda: BatchSizeWarmup("4 for 1 steps then 8", 8, 4),
            {"module": Manual},
            MANUAL + ".*; accumulate in training_step",
        ),
        (GradClip, {"module": OwnClipping}, "`OwnClipping.configure_gradient_clipping` .*; delete the method"),
        (GradClip, {"gradient_clip_val": 1.0}, r"`Trainer\(gradient_clip_val=1.0\)`.*; delete gradient_clip_val"),
        (
            lambda: LayerNormFreeze([{"stop": 1}]),
            {"module": LowRank},
            "net.1.bias, net.1.weight has requires_grad=False already.*; leave all freezing to",
        ),
        (
            lambda: GradSpikeSkip(schedule_on_skip="hold"),
            {"module": ByEpochs},
            "interval='epoch': `GradSpikeSkip`.* set interval to 'step', or write schedule_on_skip='advance'",
        ),
        (
            lambda: AccumulationWindows(10, 5),
            {},
            r"batch of 4 samples: `AccumulationWindows` expects 5 per rank here \(micro_batch=5\); let the loader",
        ),
        (
            lambda: BatchSizeWarmup("4 for 1 steps then 8"),
            {},
            r"there is no data module to take it from; write `BatchSizeWarmup\('4 for 1 steps then 8', global_batch=",
        ),
        (
            lambda: SequenceLengthWarmup("2 for 1 steps"),
            {},
            r"there is no data module to take it from; write `SequenceLengthWarmup\('2 for 1 steps', ..., max_length=",
        ),
        (
            lambda: ValidateEverySteps(2),
            {"check_val_every_n_epoch": 1},
            r"`Trainer\(check_val_every_n_epoch=1\)`.*; set check_val_every_n_epoch to None",
        ),
    ],
)
def test_what_a_callback_needs_of_its_host_is_said_before_the_first_step(
    callback: Any, host: dict[str, Any], sentence: str
) -> None:
    module = host.get("module", Host)()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(MisconfigurationException, match=sentence):
        fit([callback()], module, **{k: v for k, v in host.items() if k != "module"})
    assert_same_bits(module.state_dict(), before)


# -- a bad batch, under optimizers of many kinds ---------------------------------------------------------------------


class Poisoned(Host):
    """Its third batch has no finite loss; it keeps the weights as they were before each batch."""

    make: ClassVar[Any] = staticmethod(adamw(fused=True))

    def __init__(self) -> None:
        super().__init__()
        self.before: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.before.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
        return self.loss(batch) * (torch.nan if len(self.before) == 3 else 1.0)

    def configure_optimizers(self) -> Any:
        return type(self).make(self.parameters())


class Sparse(Poisoned):
    """An embedding with sparse gradients; some rows occur twice in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(4, 4, sparse=True)

    def loss(self, batch: Any) -> Any:
        return self.net(batch.abs().long().clamp(max=3)).square().mean()


OPTIMIZERS: dict[str, Any] = {
    "foreach AdamW": adamw(fused=None, foreach=True),
    "fused AdamW": adamw(fused=True),
    "fused AdamW in a wrapper": lambda parameters: Wrapper(adamw(fused=True)(parameters)),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("callback", [GradSpikeSkip, GradClip])
@pytest.mark.filterwarnings("ignore")
def test_a_bad_batch_moves_no_weight_under_any_optimizer(callback: Any, kind: str) -> None:
    class Module(Poisoned):
        make = staticmethod(OPTIMIZERS[kind])

    trainer = fit([callback()], module := Module())
    assert Progress.of(trainer).skipped == 1
    for number, (before, after) in enumerate(zip(module.before, module.before[1:], strict=False), start=1):
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        if kind != "LBFGS":  # which looks at its batch more than once in a step
            assert moved is (number != 3), f"batch {number}"
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, lambda p: torch.optim.SGD(p, lr=0.1)], ids=["adam", "sgd"])
@pytest.mark.filterwarnings("ignore")
def test_sparse_gradients_are_measured_clipped_and_skipped(make: Any) -> None:
    class Module(Sparse):
        pass

    Module.make = staticmethod(make)
    trainer = fit([GradSpikeSkip(), GradClip(1e-3)], module := Module())
    assert Progress.of(trainer).skipped == 1
    assert_same_bits(module.before[3], module.before[2])
    assert not torch.equal(module.before[2]["net.weight"], module.before[1]["net.weight"])
    assert trainer.callback_metrics["stability/clip_frac"] == 1


def test_an_optimizer_without_step_hooks_is_refused_where_they_are_needed() -> None:
    class Module(Poisoned):
        make = staticmethod(lambda parameters: Protocol(adamw()(parameters)))

    for callback in (GradClip(), EffectiveLR(), LROverride(factor=0.5)):
        with pytest.raises(
            MisconfigurationException, match=r"`Protocol`: .* no hooks .*; derive it from torch\.optim\.O"
        ):
            fit([callback], Module())
    trainer = fit([GradSpikeSkip(), GradNorm(), StepSeed()], module := Module())
    assert Progress.of(trainer).skipped == 1
    assert_same_bits(module.before[3], module.before[2])


def test_without_any_optimizer_there_is_no_rate_to_override() -> None:
    class Module(Host):
        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(MisconfigurationException, match="`LROverride`: configure_optimizers returned no optimizer"):
        fit([LROverride(factor=0.5)], Module())


@pytest.mark.parametrize("callback", [lambda: AccumulationWindows(8, 4), lambda: BatchSizeWarmup("8", 8, 4)])
def test_another_callback_that_sets_the_window_is_refused(callback: Any) -> None:
    others = [GradientAccumulationScheduler({0: 2})]
    with pytest.raises(MisconfigurationException, match=r"`GradientAccumulationScheduler`: sets the .*; delete it, or"):
        fit([callback(), *others])
