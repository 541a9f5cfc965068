from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from text_logger import TextLogger
from tiny_fit import quiet_trainer

from lit_stable.callbacks.text_log import log_text


class WandbLogger(TextLogger):
    """By its name and signature: the real one needs a service."""

    def log_text(self, key: str, columns: list[str], data: list[list[str]]) -> None:  # type: ignore[override]
        self.texts.append((key, data[0][columns.index("text")], int(data[0][columns.index("step")])))


class MLFlowLogger(TextLogger):
    run_id = "r"

    @property
    def experiment(self) -> Any:
        return self

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:  # type: ignore[override]
        self.texts.append((artifact_file, text, 0))


class CometLogger(TextLogger):
    @property
    def experiment(self) -> Any:
        return self

    def log_text(self, text: str, step: int, metadata: dict[str, str]) -> None:  # type: ignore[override]
        self.texts.append((metadata["key"], text, step))


class Broken(TextLogger):
    def log_text(self, key: str, text: str, step: int) -> None:
        raise ConnectionError("gone")


def test_every_logger_that_takes_text_gets_it_and_the_others_are_passed_over(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path, name="board")
    takers = [TextLogger(), WandbLogger(), CometLogger()]
    trainer = quiet_trainer(logger=[board, CSVLogger(tmp_path), *takers, mlflow := MLFlowLogger()])
    log_text(trainer, "samples/0", "once upon\na time", 7)
    for taker in takers:
        assert taker.texts == [("samples/0", "once upon\na time", 7)], type(taker).__name__
    assert mlflow.texts == [("samples/0/00000007.txt", "once upon\na time", 0)]
    board.experiment.flush()
    events = EventAccumulator(board.log_dir).Reload()
    (found,) = events.Tensors("samples/0/text_summary")
    assert found.step == 7
    assert found.tensor_proto.string_val == [b"once upon\na time"]


def test_a_logger_that_fails_is_warned_of_and_the_next_is_served() -> None:
    trainer = quiet_trainer(logger=[Broken(), own := TextLogger()])
    warnings.simplefilter("always")
    with pytest.warns(UserWarning, match=r"Broken: could not take the text 'a' of step 1: ConnectionError\('gone'\)"):
        log_text(trainer, "a", "b", 1)
    assert own.texts == [("a", "b", 1)]
