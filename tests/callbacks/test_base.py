from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from forked import Script
from hosts import Gan, loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import (
    AccumulationWindows,
    GracefulStop,
    GradClip,
    GradNorm,
    Progress,
    SafeCheckpoints,
    StepSeed,
    ValidateEverySteps,
)
from lit_stable.callbacks.base import StabilityCallback, arrange, install, is_logging_step

ORDER = [Progress, StepSeed, AccumulationWindows, GradNorm, GradClip, ValidateEverySteps, SafeCheckpoints, GracefulStop]


def all_of_ours() -> list[StabilityCallback]:
    windows = AccumulationWindows(global_batch=4, micro_batch=2)
    others = [Progress(), StepSeed(), GradNorm(), GradClip(), ValidateEverySteps(), SafeCheckpoints(), GracefulStop()]
    return [windows, *others]


def kinds(callbacks: list[Callback]) -> list[type]:
    return [type(c) for c in callbacks]


def test_ours_stand_in_one_order_whatever_the_users_list() -> None:
    for shift in range(8):
        ours = all_of_ours()
        trainer = quiet_trainer(*ours[shift:], *ours[:shift])
        arrange(trainer)
        assert kinds(trainer.callbacks)[:8] == ORDER


def test_the_orders_are_all_different() -> None:
    assert len({cls.order for cls in ORDER}) == len(ORDER)


def test_foreign_callbacks_stay_in_their_places() -> None:
    first, last = Watch("setup", lambda *rest: None), Watch("teardown", lambda *rest: None)
    trainer = quiet_trainer(first, GradClip(), last, Progress())
    before = trainer.callbacks
    arrange(trainer)
    assert [trainer.callbacks[i] for i in (0, 2)] == [first, last]
    assert kinds(trainer.callbacks)[1:4:2] == [Progress, GradClip]
    assert trainer.callbacks is not before, "Lightning iterates the old list while hooks run"
    assert kinds(before)[1:4:2] == [GradClip, Progress]


def test_a_fit_arranges_and_installs_what_is_needed() -> None:
    trainer = quiet_trainer(GracefulStop(), GradClip(), AccumulationWindows(4, 2), max_steps=1)
    trainer.fit(TinyModule(), TinyData())
    ours = [c for c in trainer.callbacks if isinstance(c, StabilityCallback)]
    assert kinds(ours) == [Progress, AccumulationWindows, GradNorm, GradClip, GracefulStop]


def test_install_puts_a_callback_in_front_of_foreign_ones_and_among_ours_by_order() -> None:
    foreign = Watch("setup", lambda *rest: None)
    trainer = quiet_trainer(StepSeed(), foreign)
    install(trainer, GradNorm())
    assert kinds(trainer.callbacks)[:3] == [StepSeed, GradNorm, Watch]


def test_hooks_of_ours_run_in_that_order_from_the_first_batch_on() -> None:
    calls: list[int] = []

    class First(StabilityCallback):
        order = 1

        def on_train_batch_start(self, *args: Any) -> None:
            calls.append(self.order)

    class Second(First):
        order = 2

    trainer = quiet_trainer(Second(), First(), max_steps=2)
    trainer.fit(TinyModule(), TinyData())
    assert calls == [1, 2, 1, 2]


@pytest.mark.parametrize("cls", [StepSeed, GradNorm, SafeCheckpoints, GracefulStop])
def test_a_callback_without_state_given_twice_is_refused_by_us(cls: type[StabilityCallback]) -> None:
    trainer = quiet_trainer(cls(), cls())
    with pytest.raises(MisconfigurationException, match=rf"`{cls.__name__}`: stands 2 times in .*; keep one"):
        trainer.fit(TinyModule(), TinyData())


@pytest.mark.parametrize("cls", [Progress, GradClip])
def test_a_callback_with_state_given_twice_is_refused_by_lightning(cls: type[StabilityCallback]) -> None:
    with pytest.raises(RuntimeError, match=f"more than one stateful callback of type `{cls.__name__}`"):
        quiet_trainer(cls(), cls())


@pytest.mark.parametrize("every", [1, 2, 3])
def test_logging_steps_are_those_that_reach_the_logger(every: int, tmp_path: Any) -> None:
    said: list[int] = []

    class Say(StabilityCallback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if is_logging_step(trainer):
                said.append(trainer.global_step)
            pl_module.log("always", 1.0)

    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(Say(), AccumulationWindows(4, 2), logger=logger, log_every_n_steps=every, max_steps=6)
    trainer.fit(TinyModule(), TinyData())
    header, *rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().split()
    written = [int(row.split(",")[header.split(",").index("step")]) for row in rows]
    assert said == written == list(range(every - 1, 6, every))


def test_logging_can_be_off() -> None:
    trainer = quiet_trainer(GradClip(), log_every_n_steps=0, max_steps=2)
    trainer.fit(TinyModule(), TinyData())
    assert not is_logging_step(trainer)


def test_logging_steps_are_lightnings_own_where_several_optimizers_step_unevenly(tmp_path: Any) -> None:
    trainer = quiet_trainer(
        *(GradNorm(), Progress()), logger=CSVLogger(tmp_path), log_every_n_steps=2, max_steps=-1, max_epochs=2
    )
    trainer.fit(Gan(), loader())
    header, *rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().split()
    assert [row.split(",")[header.split(",").index("step")] for row in rows] == ["1", "3", "5"]
    for name in ("stability/grad_norm", "progress/samples"):
        assert all(row.split(",")[header.split(",").index(name)] for row in rows), "a signature is missing"


def test_a_strangers_callback_that_would_be_saved_under_the_same_name_is_refused() -> None:
    class Progress(Callback):
        def state_dict(self) -> dict[str, int]:
            return {"mine": 1}

    class Silent(Callback):  # saves nothing, so it may be called as it likes
        @property
        def state_key(self) -> str:
            return "GradClip"

    quiet_trainer(Silent(), GradClip(), max_steps=1).fit(TinyModule(), TinyData())
    Progress.__qualname__ = "Progress"
    for ours in (GradClip(), StepSeed()):  # which install our own
        with pytest.raises(
            MisconfigurationException, match=r"test_base\.Progress`: a checkpoint .*; rename the class, or"
        ):
            quiet_trainer(Progress(), ours).fit(TinyModule(), TinyData())


IMPORTS = """
from lit_stable.callbacks import GradClip
import lightning.pytorch, pytorch_lightning
print(issubclass(GradClip, pytorch_lightning.Callback), issubclass(GradClip, lightning.pytorch.Callback))
"""


def test_where_ours_were_imported_first_they_have_one_base(tmp_path: Path) -> None:
    (script := tmp_path / "imports.py").write_text(IMPORTS)
    assert Script(script, [], dict(os.environ), tmp_path).said().split() == ["False", "True"]
