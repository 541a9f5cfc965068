"""Workers outlive the signals that the trainer is sent, and not the trainer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from forked import start_process

from lit_stable.data.workers import begin_worker, end_data_workers

CONTEXT = multiprocessing.get_context("fork")  # as a loader starts its own


def work(is_ready: multiprocessing.synchronize.Event) -> None:
    begin_worker(0)
    is_ready.set()
    signal.pause()


def train(theirs: Any) -> None:
    """Start a worker, which says through the pipe what process it is, and wait to be killed."""
    worker = multiprocessing.get_context("forkserver").Process(target=tell_and_wait, args=(theirs,))
    worker.start()
    signal.pause()


def tell_and_wait(theirs: Any) -> None:
    begin_worker(0)
    theirs.send(os.getpid())
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


def test_they_end_when_the_trainer_is_killed_and_another_process_is_their_parent() -> None:
    # Under forkserver, which Python 3.14 takes by itself, the parent is a server that lives as long as any worker.
    ours, theirs = CONTEXT.Pipe()
    trainer = start_process(train, theirs)
    assert ours.poll(60)
    worker = ours.recv()
    trainer.kill()
    trainer.join()
    end = time.monotonic() + 30
    while is_running(worker) and time.monotonic() < end:
        time.sleep(0.05)
    if is_running(worker):
        os.kill(worker, signal.SIGKILL)
        pytest.fail("the worker outlived the trainer by 30 s")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
