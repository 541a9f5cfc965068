from __future__ import annotations

from typing import Any

import pytest
import torch
from late_on_a_cpu import lagging
from text_logger import TextLogger
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import DeferredLogging, GradNorm, LateReads


def rows_of(*callbacks: Any, module: Any = None, **options: Any) -> tuple[list[Any], Any]:
    logger = TextLogger()
    trainer = quiet_trainer(*callbacks, logger=logger, **{"max_steps": 5, "log_every_n_steps": 2, **options})
    trainer.fit(module or TinyModule(), TinyData())
    return logger.metrics, trainer


class Logs(TinyModule):
    """Logs at every step and at the end of the epoch; with ``axis`` a step of its own."""

    axis = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("own", torch.tensor(float(self.trainer.global_step)), on_step=True, on_epoch=True)
        if self.axis:
            self.log("step", torch.tensor(100.0 + self.trainer.global_step))


@pytest.mark.parametrize("axis", [False, True], ids=["lightnings_step", "own_step"])
@pytest.mark.parametrize("late", [LateReads, lagging], ids=["at_once", "a_batch_later"])
def test_loggers_get_what_they_get_without_it_in_the_same_order(late: Any, axis: bool) -> None:
    modules = [Logs(), Logs()]
    for module in modules:
        module.axis = axis
    plain, ours = (
        rows_of(GradNorm(), module=modules[0]),
        rows_of(GradNorm(), DeferredLogging(), late(), module=modules[1]),
    )
    assert ours[0] == plain[0]
    assert {step for step, _ in ours[0]} >= ({101, 103} if axis else {1, 3})
    assert any("own_epoch" in row for _, row in ours[0])
    for name in ("logged_metrics", "callback_metrics"):
        assert getattr(ours[1], name) == getattr(plain[1], name)


def test_a_row_comes_a_batch_later_and_the_trainer_has_the_values_at_once() -> None:
    seen: list[Any] = []
    logger = TextLogger()

    def note(trainer: Any, *rest: Any) -> None:
        seen.append((trainer.global_step, len(logger.metrics), "own_step" in trainer.logged_metrics))

    watch = Watch("on_train_batch_start", note)
    trainer = quiet_trainer(DeferredLogging(), lagging(), watch, logger=logger, max_steps=4, log_every_n_steps=2)
    trainer.fit(Logs(), TinyData())
    # Logged in the second step: with the trainer when the third begins, with the loggers when it has ended.
    assert seen[2:] == [(2, 0, True), (3, 1, True)]


def test_after_the_fit_lightning_logs_by_itself_again() -> None:
    _, trainer = rows_of(DeferredLogging(), GradNorm())
    assert not {"update_train_step_metrics", "log_metrics"} & trainer._logger_connector.__dict__.keys()
