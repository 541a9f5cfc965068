"""Jobs in processes of their own: started once for all that is tried."""

from __future__ import annotations

import os
import time

import pytest

from lit_stable.data.text.processes import run_jobs


class Square:
    """A job is a number, or what shall go wrong, perhaps a little later."""

    def __call__(self, job, advance) -> None:
        if isinstance(job, int):
            advance((job * job, os.getpid()))
            return
        kind, seconds = job
        time.sleep(seconds)
        if kind == "refuse":
            raise ValueError(f"refused after {seconds}")
        if kind == "fail":
            raise TypeError("no")
        os._exit(3)


def squares(jobs, workers: int) -> list[tuple[int, int]]:
    news: list[tuple[int, int]] = []
    run_jobs(Square(), jobs, workers, news.append)
    return news


def test_one_worker_is_this_process_and_keeps_the_order():
    assert squares([3, 1, 2], workers=1) == [(n * n, os.getpid()) for n in (3, 1, 2)]
    assert squares([3], workers=8) == [(9, os.getpid())]
    assert squares([], workers=2) == []


def test_jobs_are_shared_among_processes():
    news = squares(list(range(20)), workers=2)
    assert sorted(square for square, _ in news) == [n * n for n in range(20)]
    assert os.getpid() not in {pid for _, pid in news}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_failure_in_the_order_of_jobs_is_raised(workers):
    with pytest.raises(ValueError, match=r"refused after 0\.3"):
        squares([1, ("refuse", 0.3), ("refuse", 0.0), 2], workers)


def test_a_fault_brings_its_traceback_and_a_dead_process_its_exit_code():
    with pytest.raises(RuntimeError, match="TypeError: no"):
        squares([("fail", 0), 1], workers=2)
    with pytest.raises(ValueError, match="a process ended with 3, perhaps for want of memory"):
        squares([("die", 0), 1], workers=2)
