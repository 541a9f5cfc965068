"""SIGTERM while the ladder is at work: the run stops with a checkpoint, and goes on as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from recovery_project import RUNGS, Data, Module, ledger_lines, make_trainer, poison
from tiny_fit import Watch, assert_same_bits

from lit_stable.callbacks import GracefulStop, Recovery, fit_with_recovery
from lit_stable.callbacks.recovery_exit import RESTART, Rewind

pytestmark = pytest.mark.filterwarnings("ignore:Recovery", "ignore:step ")

STEPS = 24
#: A spike at step 12 that the ladder waits for until step 17, and steps back from to step 10: batch 18 is step 11.
BAD = poison(12, 13, 14, 15, 16)
MOMENTS = {"before_it": 9, "while_it_waits": 14, "as_it_steps_back": 17, "past_the_data": 18, "near_the_window": 21}


def fit(folder: Path, *others: Any, restart: bool = False) -> tuple[Module, GracefulStop]:
    stop, module = GracefulStop(), Module(BAD, factor=1e4)
    recovery = Recovery(RUNGS, {"spike": "wait"}, restart=restart)
    trainer = make_trainer(folder, STEPS, stop, *others, recovery=recovery)
    fit_with_recovery(trainer, module, Data(), ckpt_path="auto")
    return module, stop


def terminate_at(batch: int) -> Watch:
    """SIGTERM to this process in the batch of that number, over all fits."""
    batches = itertools.count(1)

    def send(*rest: Any) -> None:
        if next(batches) == batch:
            os.kill(os.getpid(), signal.SIGTERM)

    return Watch("on_train_batch_start", send)


def history(folder: Path) -> list[tuple[Any, ...]]:
    found = ledger_lines(folder, "wait", "rewind", "begun", "result", "stop")
    return [(e.branch, e.step, e.action, e.done.get("to"), e.done.get("dropped")) for e in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Module]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, fit(folder)[0]


def test_the_run_waits_and_steps_back_once(undisturbed: tuple[Path, Module]) -> None:
    assert [entry[:4] for entry in history(undisturbed[0])][:3] == [
        (0, 12, "wait", None),
        (0, 17, "rewind", 10),
        (1, 10, "begun", None),
    ]


@pytest.mark.parametrize("batch", MOMENTS.values(), ids=MOMENTS)
def test_a_stop_changes_nothing_whenever_it_comes(batch: int, undisturbed: tuple[Path, Module], tmp_path: Path) -> None:
    _, stop = fit(tmp_path, terminate_at(batch))
    assert stop.signal == signal.SIGTERM
    assert len(list(tmp_path.glob("stopped-step=*.ckpt"))) == 1
    module, stop = fit(tmp_path)
    assert stop.signal is None
    folder, unstopped = undisturbed
    assert history(tmp_path) == history(folder)
    assert_same_bits(module.state_dict(), unstopped.state_dict())


@pytest.mark.parametrize(
    ("others", "left_by", "code"),
    [([], Rewind, RESTART), ([terminate_at(17)], Rewind, 143), ([], SystemExit, 143)],
    ids=["unasked", "as_it_steps_back", "while_it_leaves"],
)
def test_a_process_that_was_asked_to_stop_does_not_ask_to_be_started_again(
    others: list[Watch],
    left_by: type[BaseException],
    code: int,
    undisturbed: tuple[Path, Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if left_by is SystemExit:  # the last hook before Lightning puts back the handlers from before the fit
        monkeypatch.setattr(Data, "on_exception", lambda *rest: os.kill(os.getpid(), signal.SIGTERM), raising=False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(left_by) as left:
            fit(tmp_path, *others, restart=True)
        assert (left.value.exit_code if isinstance(left.value, Rewind) else left.value.code) == code
        assert signal.getsignal(signal.SIGTERM) == before or left_by is SystemExit
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.undo()
    module, _ = fit(tmp_path, restart=True)
    folder, unstopped = undisturbed
    assert history(tmp_path) == history(folder)
    assert_same_bits(module.state_dict(), unstopped.state_dict())
