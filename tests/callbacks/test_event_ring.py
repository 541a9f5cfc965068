from __future__ import annotations

import torch

from lit_stable.callbacks.event_ring import EventRing


def late_ring(lag: int) -> EventRing:
    """A ring that lags on the CPU as it does on a GPU."""
    return EventRing(cpu_lag=lag)


def test_on_a_cpu_a_row_is_read_in_its_own_step() -> None:
    ring = EventRing()
    for step in (1, 2):
        ring.push((step, 7), torch.tensor([float(step), 0.5]))
        assert ring.take(step) == [((step, 7), [float(step), 0.5])]
    assert ring.flush() == []


def test_a_row_comes_exactly_lag_steps_later() -> None:
    ring, seen = late_ring(3), []
    for step in range(1, 7):
        ring.push((step,), torch.tensor([float(step)]))
        seen.append([key[0] for key, _ in ring.take(step)])
    assert seen == [[], [], [], [1], [2], [3]]
    assert [key[0] for key, _ in ring.flush()] == [4, 5, 6]
    assert ring.flush() == []


def test_a_step_without_a_row_delays_none() -> None:
    ring = late_ring(2)
    ring.push((1,), torch.zeros(1))
    assert ring.take(2) == []
    assert [key for key, _ in ring.take(3)] == [(1,)]


def test_a_row_is_what_it_was_when_pushed() -> None:
    ring, row = EventRing(), torch.tensor([1.0])
    ring.push((1,), row)
    row.fill_(9.0)
    assert ring.take(1) == [((1,), [1.0])]
