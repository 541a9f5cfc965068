from __future__ import annotations

import json
import math
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from text_logger import TextLogger
from tiny_fit import SaveAtSteps, TinyData, TinyModule, Watch, quiet_trainer

from lit_stable.callbacks import (
    Event,
    Events,
    GradSpikeSkip,
    LayerNormFreeze,
    LROverride,
    OptimizerReset,
    emit,
)
from lit_stable.callbacks.events import read_events

SLOW = Event(7, "slow_step", {"seconds": 2.5, "host": "node-3", "ranks": [0, 1]}, samples=[3, 4])


def test_an_event_is_a_line_a_text_and_a_call(tmp_path: Path) -> None:
    trainer = quiet_trainer(logger=(own := TextLogger()), default_root_dir=tmp_path)
    heard: list[Event] = []
    Events.of(trainer).listeners["test"] = heard.append
    emit(trainer, SLOW)
    assert read_events(tmp_path / "events.jsonl") == [SLOW] == heard
    sentence = "step 7: slow step: seconds 2.5, host node-3, ranks 0 and 1"
    assert own.texts == [("events/slow_step", sentence, 7)]


def test_the_file_stands_beside_the_trainers_own_log_and_is_only_appended_to(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    watch = Watch("on_train_batch_end", lambda t, *rest: emit(t, Event(t.global_step, "tick", {})))
    trainer = quiet_trainer(Events(), watch, max_steps=2, logger=logger)
    trainer.fit(TinyModule(), TinyData())
    emit(trainer, SLOW)
    found = read_events(Path(logger.log_dir) / "events.jsonl")
    assert [(e.step, e.kind) for e in found] == [(1, "tick"), (2, "tick"), (7, "slow_step")]


def test_a_folder_that_was_set_before_stays(tmp_path: Path) -> None:
    channel = Events()
    channel.folder = tmp_path / "run"
    quiet_trainer(channel, max_steps=1, logger=CSVLogger(tmp_path)).fit(TinyModule(), TinyData())
    assert channel.folder == tmp_path / "run"


def test_every_line_is_valid_json_whatever_the_numbers(tmp_path: Path) -> None:
    trainer = quiet_trainer(default_root_dir=tmp_path)
    emit(trainer, Event(1, "odd", {"loss": math.nan, "all": (math.inf, -math.inf, 1.5)}))
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert strict["evidence"] == {"loss": "nan", "all": ["inf", "-inf", 1.5]}


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    trainer = quiet_trainer(default_root_dir=tmp_path)
    emit(trainer, SLOW)
    path = tmp_path / "events.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "ki')
    assert read_events(path) == [SLOW]


def test_an_event_of_one_rank_says_so_and_goes_to_no_logger(tmp_path: Path) -> None:
    trainer = quiet_trainer(logger=(own := TextLogger()), default_root_dir=tmp_path)
    hang = Event(9, "hang", {"host": "a"}, rank=0)
    threads = [threading.Thread(target=emit, args=(trainer, hang)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_events(tmp_path / "events.jsonl") == [hang] * 8
    assert own.texts == []
    assert hang.sentence() == "rank 0, step 9: hang: host a"


class Rank:
    """A trainer as one rank of several sees it."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.callbacks: list[Any] = []
        self.loggers: list[Any] = []
        self.global_rank, self.is_global_zero, self.default_root_dir = rank, rank == 0, folder


def test_rank_0_writes_what_all_know_and_each_rank_what_it_alone_knows(tmp_path: Path) -> None:
    for rank in range(3):
        emit(Rank(rank, tmp_path), SLOW)  # type: ignore[arg-type]
    emit(Rank(2, tmp_path), Event(9, "hang", {}, rank=2))  # type: ignore[arg-type]
    assert read_events(tmp_path / "events.jsonl") == [SLOW]
    assert [e.kind for e in read_events(tmp_path / "events.rank2.jsonl")] == ["hang"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_cannot_be_written_is_warned_of_once_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    trainer = quiet_trainer(default_root_dir=tmp_path / "taken")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        emit(trainer, SLOW)
        emit(trainer, SLOW)
    assert sum("cannot write" in str(w.message) for w in caught) == 1


def test_who_is_informed_of_what_was_asked_for_is_not_warned(tmp_path: Path) -> None:
    trainer = quiet_trainer(default_root_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emit(trainer, SLOW, warns=False)
        with pytest.raises(UserWarning, match="slow step"):
            emit(trainer, SLOW)


WINDOW: Any = [{"modules": ["net.0"], "norms": "with", "start": 2, "stop": 3}]
#: What a callback tells of, by step, and the line for people as it begins. All that happens is of steps 3 and 4.
TOLD: dict[str, tuple[Any, list[tuple[int, str, str]]]] = {
    "GradSpikeSkip": (
        lambda action: GradSpikeSkip(threshold=100.0, z_score=None, action=action),
        [(3, "skipped_step", "GradSpikeSkip: step 3: {}skipped: gradient norm")],
    ),
    "LROverride": (
        lambda action: LROverride(start=2, factor=0.5, action=action),
        [(3, "lr_override", "LROverride: at 2 steps {}override{s} lr 0.05 -> 0.025")],
    ),
    "OptimizerReset": (
        lambda action: OptimizerReset(start=2, hold_steps=2, action=action),
        [(3, "optimizer_reset", "OptimizerReset: {}set{s} moments and step counts to zero after 2 steps, 4 samples;")],
    ),
    "LayerNormFreeze": (
        lambda action: LayerNormFreeze(WINDOW, action=action),
        [
            (3, "freeze", "LayerNormFreeze, steps 2: {}freeze net.0.bias, net.0.weight"),
            (4, "set_free", "LayerNormFreeze, steps 3: {}set free net.0.bias, net.0.weight"),
        ],
    ),
    "LayerNormFreeze by samples": (
        lambda action: LayerNormFreeze([{**WINDOW[0], "start": 3, "stop": 6}], unit="samples", action=action),
        [
            (3, "freeze", "LayerNormFreeze, samples 4: {}freeze net.0.bias, net.0.weight"),
            (4, "set_free", "LayerNormFreeze, samples 6: {}set free net.0.bias, net.0.weight"),
        ],
    ),
}


@pytest.mark.filterwarnings("ignore:GradSpikeSkip")
@pytest.mark.parametrize("action", ["act", "log"])
@pytest.mark.parametrize("name", TOLD)
def test_what_acts_on_a_run_tells_it_once_to_all_who_listen(name: str, action: str, tmp_path: Path) -> None:
    make, expected = TOLD[name]

    def fit(folder: str, resume: Path | None = None, *others: Any) -> list[Event]:
        logger, heard = TextLogger(), []
        trainer = quiet_trainer(
            make(action), channel := Events(), *others, max_steps=5, logger=logger, default_root_dir=tmp_path / folder
        )
        channel.listeners["test"] = heard.append
        trainer.fit(TinyModule(poison={2: 1e4}), TinyData(), ckpt_path=resume)
        path = tmp_path / folder / "events.jsonl"
        assert repr(read_events(path) if path.exists() else []) == repr(heard)
        assert logger.texts == [(f"events/{e.kind}", e.sentence(), e.step) for e in heard]
        return heard

    told = fit("straight")
    would, s = ("would have been " if "Spike" in name else "would ", "") if action == "log" else ("", "s")
    for event, (step, kind, line) in zip(told, expected, strict=True):
        assert (event.step, event.kind, event.rank) == (step, kind, None)
        assert event.evidence["acted"] == (action == "act")
        assert event.sentence().startswith(line.format(would, s=s))
    assert repr(fit("saving", None, SaveAtSteps(tmp_path))) == repr(told)
    for step in (2, 3, 4):  # before the first, between the two, after all
        rest = [event for event in told if event.step > step]
        assert repr(fit(f"from-{step}", tmp_path / f"micro-{step}.ckpt")) == repr(rest), step
