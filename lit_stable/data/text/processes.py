"""Share jobs among processes that end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar, cast

JobT = TypeVar("JobT")
NewsT = TypeVar("NewsT")
JobT_contra = TypeVar("JobT_contra", contravariant=True)
NewsT_co = TypeVar("NewsT_co", covariant=True)


class Work(Protocol[JobT_contra, NewsT_co]):
    """What is done with a job; it calls its second argument with news, often enough to see that its parent is gone."""

    def __call__(self, job: JobT_contra, advance: Callable[[Any], None], /) -> None: ...


_FAILURES: dict[str, Callable[[Any], Exception]] = {
    "refused": ValueError,
    "system": lambda told: OSError(*told),
    "failed": RuntimeError,
}


def run_jobs(work: Work[JobT, NewsT], jobs: Sequence[JobT], workers: int, advance: Callable[[NewsT], None]) -> None:
    """Do all ``jobs``; ``advance`` hears the news of them as they come.

    With one worker they are done here, in order. With more, processes take them in order, each the next one when it is
    free. When one fails, those before it are finished, and the first that failed is raised: which one that is does not
    depend on the number of processes.

    Raises:
        ValueError: what a job raised, or that a process was killed.
        OSError: what a job raised, such as that the disk is full.
        RuntimeError: with its traceback, when a job raised anything else.
    """
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            work(job, advance)
        return
    pool = [_start(work) for _ in range(min(workers, len(jobs)))]
    try:
        _share(dict(pool), jobs, advance)
    finally:
        for connection, process in pool:
            connection.close()
            process.kill()  # idle, or at something that nobody waits for any more
            process.join()


def _share(pool: dict[Connection, BaseProcess], jobs: Sequence[Any], advance: Callable[[Any], None]) -> None:
    waiting = iter(range(len(jobs)))
    at: dict[Connection, int] = {}
    failures: dict[int, Exception] = {}

    def give(connection: Connection) -> None:
        at.pop(connection, None)
        number = next(waiting, None) if not failures else None
        if number is not None:
            at[connection] = number
            connection.send(jobs[number])

    for connection in pool:
        give(connection)
    while any(not failures or number < min(failures) for number in at.values()):
        for connection in cast(list[Connection], wait(list(at))):
            kind, value = _receive(connection, pool[connection])
            if kind == "news":
                advance(value)
                continue
            if kind != "done":
                failures[at[connection]] = _FAILURES[kind](value)
            give(connection)
    if failures:
        raise failures[min(failures)]


def _receive(connection: Connection, process: BaseProcess) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = connection.recv()
        return message
    except EOFError:
        process.join()
        return "refused", (
            f"a process ended with {process.exitcode}, perhaps for want of memory; what is finished is kept: run the"
            " command again, with fewer workers."
        )


def _start(work: Any) -> tuple[Connection, BaseProcess]:
    # A fork of a process with threads may hang, and would hold the other workers' ends of their pipes open.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    process.start()
    theirs.close()
    return ours, process


class _ParentIsGone(Exception):
    """Nobody is left to work for."""


def _serve(connection: Connection, work: Any) -> None:
    """The life of a process: jobs, one after the other, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent sees to its children
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as there shall be threads

    def advance(news: Any) -> None:
        if connection.poll():  # no job is sent while one is done, so that this is the end of the pipe
            raise _ParentIsGone
        connection.send(("news", news))

    try:
        while True:
            job = connection.recv()
            try:
                work(job, advance)
                connection.send(("done", None))
            except ValueError as error:
                connection.send(("refused", str(error)))
            except (_ParentIsGone, ConnectionError):
                raise
            except OSError as error:
                connection.send(("system", (error.errno, error.strerror or str(error), error.filename)))
            except Exception:
                connection.send(("failed", traceback.format_exc()))
    except (EOFError, _ParentIsGone, ConnectionError):
        return
