"""On one process there is nobody to agree with; two ranks: tests/distributed, by those that agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lit_stable.callbacks.host_agreement import HostAgreement


def test_one_process_opens_no_group_and_is_of_its_own_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "new_group", lambda **options: pytest.fail("a group for one"))
    agreement, trainer = HostAgreement(), SimpleNamespace(world_size=1)
    agreement.open(trainer)  # type: ignore[arg-type]
    assert agreement.largest(3) == 3
    assert agreement.from_rank_0(["mine"]) == ["mine"]
    agreement.close()


def test_a_group_is_opened_once_and_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda **options: done.append(options) or "group")
    monkeypatch.setattr(dist, "destroy_process_group", done.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    agreement, trainer = HostAgreement(), SimpleNamespace(world_size=2, strategy=None)
    for _ in range(2):
        agreement.open(trainer)  # type: ignore[arg-type]
    for _ in range(2):
        agreement.close()
    assert done == [{"backend": "gloo", "timeout": None}, "group"]


def test_the_wait_for_sums_can_be_clocked_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    @contextmanager
    def clocked() -> Iterator[None]:
        order.append("begins")
        yield
        order.append("ends")

    monkeypatch.setattr(dist, "new_group", lambda **options: "group")
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda *rest, **options: SimpleNamespace(wait=lambda: order.append("waits"), is_completed=lambda: True),
    )
    agreement = HostAgreement()
    agreement.open(SimpleNamespace(world_size=2, strategy=None))  # type: ignore[arg-type]
    agreement.waiting = clocked
    wait = agreement.begin_sums([3, 4])
    assert order == []
    assert wait() == [3, 4]
    assert order == ["begins", "waits", "ends"]
    agreement.close()
    assert agreement.waiting is nullcontext


@pytest.mark.parametrize("completed", [True, False])
def test_a_group_with_sums_that_a_stuck_rank_never_joins_is_left_alone(
    completed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking it down waits for that rank, so that a collective that timed out elsewhere ends no process."""
    taken: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", taken.append)
    agreement = HostAgreement()
    agreement._group, agreement._begun = "group", SimpleNamespace(is_completed=lambda: completed)
    agreement.close()
    assert taken == (["group"] if completed else [])
    assert not agreement.is_open
