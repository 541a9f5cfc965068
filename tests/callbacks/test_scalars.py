from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from text_logger import TextLogger
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
from tiny_gpt_run import fit

from lit_stable.callbacks import Scalars


def adds(names: list[str], values: Any) -> Watch:
    return Watch("on_before_optimizer_step", lambda t, o: Scalars.of(t).add(names, values))


def test_numbers_reach_every_logger_in_one_row_with_lightnings_own_step() -> None:
    logger = TextLogger()
    watches = adds(["a/x", "a/y"], torch.tensor([1.0, 2.0])), adds(["a/z"], [3.0])
    trainer = quiet_trainer(*watches, Scalars(), max_steps=2, logger=logger, log_every_n_steps=1)
    module = TinyModule()
    module.on_before_optimizer_step = lambda optimizer: module.log("own", 7.0)  # type: ignore[method-assign]
    trainer.fit(module, TinyData(resumes=False))
    rows = [(step, row) for step, row in logger.metrics if "a/x" in row]
    assert rows == [(0, {"a/x": 1.0, "a/y": 2.0, "a/z": 3.0}), (1, {"a/x": 1.0, "a/y": 2.0, "a/z": 3.0})]
    assert [step for step, row in logger.metrics if "own" in row] == [0, 1]


def test_where_the_module_logs_a_step_it_is_the_x_axis(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)

    def use(trainer: Any) -> None:
        trainer.loggers = [logger]

    fit(steps=2, callbacks=(Watch("on_train_start", use), adds(["a/x"], [1.5])))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["a/x"]] == ["1", "2"]
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "2"]


def test_they_are_among_the_trainers_metrics_when_the_batch_has_ended() -> None:
    seen: list[float] = []
    last = Watch("on_train_batch_end", lambda t, *rest: seen.append(float(t.callback_metrics["a/x"])))
    trainer = quiet_trainer(adds(["a/x"], [0.1]), Scalars(), last, max_steps=2)
    trainer.fit(TinyModule(), TinyData())
    assert seen == [0.1, 0.1]
    assert float(trainer.logged_metrics["a/x"]) == 0.1


def test_nothing_of_a_fit_that_failed_is_left_for_the_next() -> None:
    scalars = Scalars()
    scalars.add(["a"], [1.0])
    trainer = quiet_trainer(scalars)
    scalars.on_exception(trainer, TinyModule(), RuntimeError())
    scalars.on_train_batch_end(trainer, TinyModule())
    assert "a" not in trainer.callback_metrics
