"""Workers outlive the signals that the trainer is sent, and not the trainer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from forked import start_process
from torch.utils.data import IterableDataset

from lit_stable.data.workers import BeginWorker, end_data_workers, make_loader

CONTEXT = multiprocessing.get_context("fork")  # as a loader starts its own


class Endless(IterableDataset[int]):
    """Samples without end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def wait_like_a_worker(is_ready: multiprocessing.synchronize.Event) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_ready.set()
    signal.pause()


def train(theirs: Any) -> None:
    """Start a worker, which says through the pipe what process it is, and wait to be killed."""
    worker = multiprocessing.get_context("forkserver").Process(target=tell_and_wait, args=(theirs,))
    worker.start()
    signal.pause()


def tell_and_wait(theirs: Any) -> None:
    BeginWorker(1)(0)
    theirs.send(os.getpid())
    signal.pause()


@pytest.fixture
def stranger() -> Iterator[BaseProcess]:
    """A daemonic process that somebody else has started in the same project."""
    is_ready = CONTEXT.Event()
    process = CONTEXT.Process(target=wait_like_a_worker, args=(is_ready,), daemon=True)
    process.start()
    assert is_ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_they_ignore_what_the_trainer_is_sent_and_are_ended_when_it_ends(stranger: BaseProcess) -> None:
    before = set(multiprocessing.active_children())
    batches = iter(make_loader(Endless(), 1, torch.device("cpu")))
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(worker.pid, number)
    worker.join(0.2)
    assert worker.exitcode is None
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's raises here, for a worker that was killed
    end_data_workers()
    worker.join(30)
    stranger.join(0.2)
    del batches
    signal.signal(signal.SIGCHLD, handler)
    assert (worker.exitcode, stranger.exitcode) == (-signal.SIGKILL, None)


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


def test_what_a_worker_that_is_started_anew_imports_is_not_lightning() -> None:
    """Under forkserver and spawn each of them imports the modules of what it is given."""
    code = "import sys, lit_stable.data.stream, lit_stable.data.workers; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "False"
