"""What every callback of the package promises, one by one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import SaveAtSteps, TinyData, TinyModule, assert_same_bits, quiet_trainer, snapshot, train_more

import lit_stable.callbacks as package
from lit_stable.callbacks import AccumulationWindows, GradClip, Progress, StepSeed, ValidateEverySteps
from lit_stable.callbacks.base import StabilityCallback

CLASSES = [getattr(package, name) for name in package.__all__ if inspect.isclass(getattr(package, name))]

# Arguments for the classes that have none by default, and for those whose default would not act in a tiny run.
ARGUMENTS: dict[type, dict[str, Any]] = {
    AccumulationWindows: {"global_batch": 4, "micro_batch": 2},
    package.BatchSizeWarmup: {"ramp": "4 for 1 steps then 8", "global_batch": 8, "micro_batch": 2},
    package.SequenceLengthWarmup: {"shape": "4 for 1 steps", "max_length": 4},  # the module takes no other width
    GradClip: {"max_norm": 0.05},
    package.LayerNormFreeze: {"rules": [{"modules": ["net.0"], "norms": "with", "start": 1, "stop": 3}]},
    package.LROverride: {"start": 2, "factor": 0.5, "betas": (0.5, 0.9)},
    package.OptimizerReset: {"start": 2, "hold_steps": 1},
    ValidateEverySteps: {"every": 2},
}
TRAINER: dict[type, dict[str, Any]] = {ValidateEverySteps: {"check_val_every_n_epoch": None}}
# Those whose presence moves no weight. (GradClip above its threshold is tested with GradClip.)
OBSERVERS = [
    c
    for c in CLASSES
    if c
    not in (
        package.LROverride,
        package.LayerNormFreeze,
        package.OptimizerReset,
        package.BatchSizeWarmup,
        package.SequenceLengthWarmup,
        AccumulationWindows,
        GradClip,
        StepSeed,
    )
]

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


def make(cls: type[StabilityCallback]) -> StabilityCallback:
    return cls(**ARGUMENTS.get(cls, {}))


def trainer_with(cls: type[StabilityCallback], *others: Any, **options: Any) -> Any:
    return quiet_trainer(make(cls), *others, **{**TRAINER.get(cls, {}), **options})


def test_the_public_names_are_these() -> None:
    assert package.__all__ == [
        "AccumulationWindows",
        "BatchSizeWarmup",
        "EffectiveLR",
        "GracefulStop",
        "GradClip",
        "GradNorm",
        "GradSpikeSkip",
        "LROverride",
        "LayerNormFreeze",
        "OptimizerReset",
        "Progress",
        "SafeCheckpoints",
        "SequenceLengthWarmup",
        "StepSeed",
        "ValidateEverySteps",
        "global_grad_norm",
    ]


@every_class
def test_is_a_stability_callback_whose_docstring_is_a_manual(cls: type[StabilityCallback]) -> None:
    assert issubclass(cls, StabilityCallback)
    manual = inspect.getdoc(cls) or ""
    assert "Example::" in manual
    assert "ogged" in manual, "says which metrics it logs, or that it logs none"
    for name in inspect.signature(cls).parameters:
        assert f"\n    {name}: " in manual, f"argument {name} is not explained"


@every_class
def test_logs_what_its_docstring_says_and_nothing_else(cls: type[StabilityCallback], tmp_path: Path) -> None:
    trainer = trainer_with(cls, max_steps=2, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(TinyModule(), TinyData(validation_batches=1))
    # With those of the callbacks that this one installs.
    manuals = [inspect.getdoc(type(c)) or "" for c in trainer.callbacks if isinstance(c, StabilityCallback)]
    documented = {key for manual in manuals for key in re.findall(r"``((?:stability|progress)/\w+)``", manual)}
    assert trainer.logged_metrics.keys() == documented


@every_class
def test_arguments_can_come_from_yaml(cls: type[StabilityCallback]) -> None:
    for name, parameter in inspect.signature(cls).parameters.items():
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD, "hides keys"
        assert parameter.annotation is not inspect.Parameter.empty, name
        default = parameter.default
        assert default is inspect.Parameter.empty or default is None or isinstance(default, (int, float, str)), name


@every_class
def test_fits_a_foreign_module_and_steps(cls: type[StabilityCallback]) -> None:
    trainer = trainer_with(cls, max_steps=3)
    before = TinyModule().state_dict()
    trainer.fit(module := TinyModule(), TinyData(validation_batches=1))
    assert trainer.global_step == 3
    assert not torch.equal(module.state_dict()["net.0.weight"], before["net.0.weight"])


@every_class
def test_fits_twice_with_one_trainer(cls: type[StabilityCallback]) -> None:
    trainer = trainer_with(cls, max_steps=2)
    module, data = TinyModule(), TinyData(validation_batches=1)
    trainer.fit(module, data)
    train_more(trainer, 2)
    trainer.fit(module, data)
    assert trainer.global_step == 4
    assert Progress.of(trainer).steps == 4


def attributes(instance: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(instance).items() if callable(v) or isinstance(v, (int, float, str, type(None)))}


@every_class
def test_leaves_trainer_strategy_loop_and_optimizer_as_found(cls: type[StabilityCallback]) -> None:
    def touched(trainer: Any) -> dict[str, Any]:
        return {
            "strategy": attributes(trainer.strategy).keys(),
            "loop": vars(trainer.fit_loop.epoch_loop).keys(),
            "optimizer": vars(trainer.optimizers[0]).keys(),
            "hooks": [
                len(trainer.optimizers[0]._optimizer_step_pre_hooks),
                len(trainer.optimizers[0]._optimizer_step_post_hooks),
            ],
            "windows": (type(trainer.accumulate_grad_batches), trainer.accumulate_grad_batches),
            "validation": (type(trainer.val_check_batch), trainer.val_check_batch),
        }

    bare = quiet_trainer(max_steps=2, **TRAINER.get(cls, {}))
    bare.fit(TinyModule(), TinyData(resumes=False, validation_batches=1))
    ours = trainer_with(cls, max_steps=2)
    ours.fit(TinyModule(), TinyData(resumes=False, validation_batches=1))
    assert touched(ours) == touched(bare)


@every_class
def test_a_validation_before_the_fit_leaves_the_trainer_as_found(cls: type[StabilityCallback]) -> None:
    trainer = trainer_with(cls, accumulate_grad_batches=3)
    trainer.validate(TinyModule(), TinyData(validation_batches=1), verbose=False)
    assert trainer.accumulate_grad_batches == 3


@every_class
def test_state_round_trips_through_the_restricted_unpickler(cls: type[StabilityCallback], tmp_path: Path) -> None:
    trainer = trainer_with(cls, max_steps=3, log_every_n_steps=2)
    trainer.fit(TinyModule(), TinyData(validation_batches=1))
    state = next(c for c in trainer.callbacks if type(c) is cls).state_dict()
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    before = repr(loaded)
    twin = make(cls)
    twin.load_state_dict(loaded)
    assert_same_bits(twin.state_dict(), state)
    assert repr(loaded) == before, "the argument was changed"


@every_class
def test_a_whole_checkpoint_loads_with_weights_only(cls: type[StabilityCallback], tmp_path: Path) -> None:
    trainer = trainer_with(cls, max_steps=2)
    trainer.fit(TinyModule(), TinyData(validation_batches=1))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 2


@every_class
def test_resumes_from_a_checkpoint_that_never_had_it(cls: type[StabilityCallback], tmp_path: Path) -> None:
    first = quiet_trainer(Progress(), max_steps=2)
    first.fit(TinyModule(), TinyData())
    first.save_checkpoint(tmp_path / "a.ckpt")
    second = trainer_with(cls, *([] if cls is Progress else [Progress()]), max_steps=4)
    second.fit(TinyModule(), TinyData(validation_batches=1), ckpt_path=tmp_path / "a.ckpt")
    assert second.global_step == 4


WINDOW, STEPS = 3, 4  # micro-batches per optimizer step, optimizer steps
SAVE_POINTS = {
    "before_first_step": "start",
    "step_boundary": f"micro-{2 * WINDOW}",
    "mid_window": f"micro-{WINDOW + 2}",
}


def fit_windows(cls: type[StabilityCallback], *others: Any, resume: Path | None = None, **module: Any) -> Any:
    """A fit of STEPS windows of WINDOW micro-batches with dropout: every callback, in the company it needs."""
    company: list[Callable[[], StabilityCallback]] = [
        lambda: AccumulationWindows(global_batch=2 * WINDOW, micro_batch=2),
        lambda: StepSeed(seed=1),
    ]
    callbacks = [c for c in (make_one() for make_one in company) if not issubclass(cls, type(c))]
    own = AccumulationWindows(2 * WINDOW, 2) if cls is AccumulationWindows else make(cls)
    trainer = quiet_trainer(own, *callbacks, *others, **TRAINER.get(cls, {}), max_steps=STEPS, log_every_n_steps=3)
    trainer.fit(TinyModule(dropout=0.3, **module), TinyData(validation_batches=1), ckpt_path=resume)
    return trainer


@every_class
def test_resumes_bit_for_bit_from_any_save_point(cls: type[StabilityCallback], tmp_path: Path) -> None:
    straight = fit_windows(cls)
    saving = fit_windows(cls, SaveAtSteps(tmp_path))
    assert_same_bits(snapshot(saving), snapshot(straight), "saving changed the run")
    for kind, name in SAVE_POINTS.items():
        torch.manual_seed(1234)  # whatever the generators held before must not matter
        resumed = fit_windows(cls, resume=tmp_path / f"{name}.ckpt")
        assert_same_bits(snapshot(resumed), snapshot(straight), kind)
        for callback in resumed.callbacks:
            twin = next(c for c in straight.callbacks if type(c) is type(callback))
            assert_same_bits(callback.state_dict(), twin.state_dict(), f"{kind}, {type(callback).__name__}")


@pytest.mark.parametrize("cls", OBSERVERS, ids=lambda c: c.__name__)
def test_an_observer_moves_no_bit(cls: type[StabilityCallback]) -> None:
    weights = []
    for callbacks in ([], [make(cls)]):
        torch.manual_seed(0)
        trainer = quiet_trainer(*callbacks, max_steps=4, **TRAINER.get(cls, {}))
        trainer.fit(TinyModule(dropout=0.3), TinyData(resumes=False))
        weights.append(snapshot(trainer)["weights"])
    assert_same_bits(weights[1], weights[0])
