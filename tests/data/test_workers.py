"""Workers outlive the signals that the trainer is sent, and not the trainer."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from lit_stable.data.workers import end_data_workers, leave_signals_to_the_trainer

CONTEXT = multiprocessing.get_context("fork")  # as a loader starts its own


def work(is_ready: multiprocessing.synchronize.Event) -> None:
    leave_signals_to_the_trainer(0)
    is_ready.set()
    signal.pause()


@pytest.fixture
def children() -> Iterator[list[BaseProcess]]:
    """A worker, and a process that somebody else has started."""
    ready = [CONTEXT.Event(), CONTEXT.Event()]
    started = [CONTEXT.Process(target=work, args=(one,), daemon=one is ready[0]) for one in ready]
    for process, is_ready in zip(started, ready, strict=True):
        process.start()
        assert is_ready.wait(60)
    yield started
    for process in started:
        process.kill()
        process.join()


def test_they_ignore_what_the_trainer_is_sent_and_are_ended_when_it_ends(
    children: list[BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "active_children", lambda: children)  # of other tests there may be some
    worker, other = children
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    end_data_workers()
    worker.join(30)
    assert (worker.exitcode, other.exitcode) == (-signal.SIGKILL, None)
